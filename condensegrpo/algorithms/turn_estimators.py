"""Estimators that give the turns of a trajectory different advantages. Torch only.

``ms_grpo``, ``mt_grpo`` and ``ms_po`` treat the turns up to the first tool result unlike the turns after it;
``fold_grpo`` adds the turn rewards of single turns, and ``gigpo`` compares turns that were given the very same context.
Arguments and suffixes as in ``condensegrpo.algorithms.advantages``, further ``_V`` visits (turns of all trajectories in
one list) and ``_F`` first visits (one for every trajectory and state that it was in), and

    b(t) = 1 for t ≤ result_turn, else 0; 0 for all t of a trajectory without a result

The turn that called the tool is before the result: it was sampled without having seen it. Statistics are over *all*
trajectories of the group, with or without a result. ``ms_grpo``, ``mt_grpo`` and ``ms_po`` come from the repository
Multi-Turn-RL-Agent of https://arxiv.org/abs/2505.11821, whose paper describes MT-GRPO.

One example serves these three, a group with ε = 0 and defaults otherwise:

    trajectory   R^O  R^T  turns  result turn     N(R^O)  N(R^T)  N(R^T+R^O)
    0            0    1    2      −1              −1      −1      −2/√3
    1            1    3    3      1                0       1       1/√3
    2            2    2    2      0                1       0       1/√3
"""

from functools import partial
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from condensegrpo.algorithms.advantages import (
    Batch,
    Epsilon,
    Estimate,
    Scale,
    Singleton,
    Term,
    against_group,
    discounts,
    estimator,
    first,
    group_indices,
    mean,
    name_of,
    sizes,
    std,
    total,
    turn_indices,
)

NO_TURN = -1  # the state beyond a trajectory's turns


@estimator(summary="outcome, plus turn rewards on the turns up to the first tool result", sees_turn_rewards=True)
def ms_grpo(
    batch: Batch, *, coef: float = 1.0, scale: Scale = "std", singleton: Singleton = "zero", eps: Epsilon = 1e-4
) -> Estimate:
    """The outcome for all turns, and the turn rewards for those up to the first tool result.

    A_it = N_ε(R^O)_i + coef · N_ε(R^T)_i · b(t);   without a result b = 0, so N_ε(R^O)_i

    MS-GRPO of the Multi-Turn-RL-Agent repository.

    Biased by: what ``grpo`` is; R^T and R^O are put on one scale before they are added, so that a turn reward that
    hardly varies weighs as much as the outcome; rewards of later turns are credited to the turns before the result; the
    trajectories with a result are a part of those that N(R^T) was centred on, so that theirs need not sum to zero.

    Example (of the module): [−1, −1, ·], [0 + 1, 0 + 1, 0], [1 + 0, 1, ·].

    Args:
        coef: the weight of the turn rewards; 0 is ``grpo``.

    Returns:
        float (N, K), of two values at most in each trajectory.
    """
    compared = partial(against_group, group_N=batch.group_N, scale=scale, singleton=singleton, eps=eps)
    return total(compared("R^O", batch.outcome_N), _turn_term(compared("R^T", batch.turn_N), batch, coef))


@estimator(summary="as ms_grpo; without a tool result turn and outcome rewards added", sees_turn_rewards=True)
def mt_grpo(
    batch: Batch, *, coef: float = 1.0, scale: Scale = "std", singleton: Singleton = "zero", eps: Epsilon = 1e-4
) -> Estimate:
    """As ``ms_grpo``, but a trajectory without a tool result has all its rewards on all its turns.

        A_it = N_ε(R^O)_i + coef · N_ε(R^T)_i · b(t)     with a result
        A_it = N_ε(R^T + R^O)_i                          without

    MT-GRPO (https://arxiv.org/abs/2505.11821, turn-level credit assignment), in the form of its repository.

    Biased by: what ``ms_grpo`` is; siblings with and without a result are measured on two scales, so that using a tool
    at all moves a trajectory's advantage, and a group need not sum to zero.

    Example (of the module): [−2/√3, −2/√3, ·], [0 + 1, 0 + 1, 0], [1 + 0, 1, ·].

    Args:
        coef: the weight of the turn rewards where there is a result.

    Returns:
        float (N, K), of two values at most in each trajectory.
    """
    compared = partial(against_group, group_N=batch.group_N, scale=scale, singleton=singleton, eps=eps)
    has_result_N = batch.result_turn_N >= 0
    return total(
        compared("R^O", batch.outcome_N)._replace(applies_NK=has_result_N),
        _turn_term(compared("R^T", batch.turn_N), batch, coef),
        compared("R^T + R^O", batch.turn_N + batch.outcome_N)._replace(applies_NK=~has_result_N),
    )


@estimator(
    summary="turn rewards and outcome up to the first tool result, the outcome alone after it", sees_turn_rewards=True
)
def ms_po(
    batch: Batch,
    *,
    gamma: Annotated[float, Ge(0)] = 1.0,
    scale: Scale = "std",
    singleton: Singleton = "zero",
    eps: Epsilon = 1e-4,
) -> Estimate:
    """Two stages: before the first tool result the return of both, after it that of the outcome alone.

        A_it = N_ε(R^T + γ·R^O)_i     where b(t) = 1, and on all turns of a trajectory without a result
        A_it = N_ε(R^O)_i             after the result

    MS-PO of the Multi-Turn-RL-Agent repository.

    Biased by: what ``grpo`` is; whichever of R^T and γ·R^O varies more drowns the other before the result; rewards of
    turns after the result are credited to those before it.

    Example (of the module): [−2/√3, −2/√3, ·], [1/√3, 1/√3, 0], [1/√3, 1, ·].

    Args:
        gamma: γ ≥ 0, what the outcome counts for at the stage before it.

    Returns:
        float (N, K), of two values at most in each trajectory.
    """
    compared = partial(against_group, group_N=batch.group_N, scale=scale, singleton=singleton, eps=eps)
    after_NK = (batch.result_turn_N[:, None] >= 0) & ~_before_result(batch)
    both, outcome = compared("R^T + γ·R^O", batch.turn_N + gamma * batch.outcome_N), compared("R^O", batch.outcome_N)
    return total(_at(both, ~after_NK), _at(outcome, after_NK))


def _before_result(batch: Batch) -> Tensor:
    """b(t), bool (N, K): turn t is sampled before its trajectory's first tool result is seen.

    By the index of the turn, and never by where a mask of tokens changes: a turn without tokens, or two that touch,
    would shift it.
    """
    return turn_indices(batch.turns_N) <= batch.result_turn_N[:, None]


def _turn_term(turn: Term, batch: Batch, coef: float) -> Term:
    """coef·N(R^T)·b(t)."""
    weighted = turn._replace(name=f"coef·{turn.name}·b(t)", value_NK=coef * turn.value_NK)
    return _at(weighted, _before_result(batch))


def _at(term: Term, applies_NK: Tensor) -> Term:
    """A term of whole trajectories at some of their turns."""
    return term._replace(value_NK=term.value_NK[:, None], applies_NK=applies_NK)


@estimator(summary="the outcome, and each turn its own turn rewards in units of the outcome", sees_turn_rewards=True)
def fold_grpo(
    batch: Batch,
    *,
    turn_reward_NK: Tensor,
    low: float = 0.0,
    high: float = 1.0,
    scale: Scale = "std",
    singleton: Singleton = "zero",
    eps: Epsilon = 1e-6,
) -> Estimate:
    """The outcome for all turns, and for each turn what it was itself paid.

        A_it = N_ε(R^O)_i + Q_it
        Q_it = (clip(R^O_i + r_it, low, high) − R^O_i) / (std_g + ε)     r_it: the turn rewards of turn t
        Q_it = 0                                                         where std_g = 0

    and without (std_g + ε) where scale="none". FoldGRPO (https://arxiv.org/abs/2510.11967): for outcomes in [low, high]
    that differ this is (clip(R_i + Q_it, 0, 1) − mean_g) / std_g. The clip keeps a wrong trajectory from being
    penalised twice; an outcome beyond low or high is itself the bound. A group without a difference gives no signal, as
    everywhere here. Statistics are of outcomes alone, so that turn rewards move no sibling.

    Biased by: what ``grpo`` is; penalties, which only trajectories with an outcome above ``low`` feel, and which push a
    turn of the best trajectory down for what was perhaps needed.

    Example: outcomes [1, 0], turn rewards [[0, −1], [−1, ·]], ε = 0: std is 1/√2, N = ±0.707. The penalty of trajectory
    0 is (0 − 1)·√2, that of trajectory 1 is clipped away: [[0.707, −0.707], [−0.707, ·]].

    Args:
        turn_reward_NK: float, what each turn was paid, 0 beyond a trajectory's turns.
        low: least reward of a turn, outcome included.
        high: most.

    Returns:
        float (N, K).
    """
    if low > high:
        raise ValueError(f"the estimator 'fold_grpo' has low={low} and high={high}, wanted low <= high")
    outcome = against_group("R^O", batch.outcome_N, batch.group_N, scale=scale, singleton=singleton, eps=eps)
    outcome_N1, deviation_N1 = batch.outcome_N[:, None], std(batch.outcome_N, batch.group_N)[:, None]
    bounded_NK = (outcome_N1 + turn_reward_NK).clamp(outcome_N1.clamp(max=low), outcome_N1.clamp(min=high))
    scale_N1 = deviation_N1 + eps if scale == "std" else torch.ones_like(deviation_N1)
    process_NK = torch.where(deviation_N1 > 0, (bounded_NK - outcome_N1) / scale_N1, 0.0)
    return total(outcome, Term("Q", process_NK, {"r": turn_reward_NK}))


@estimator(summary="grpo, plus a comparison of turns sampled from the same context")
def gigpo(
    batch: Batch,
    *,
    state_NK: Tensor,
    coef: float = 1.0,
    gamma: Annotated[float, Ge(0), Le(1)] = 0.95,
    scale: Scale = "std",
    eps: Epsilon = 1e-6,
) -> Estimate:
    """The outcome for all turns, and for each turn how it did against siblings that were given the same context.

        A_it = N_ε(R^O)_i + coef · S_it
        G_it = γ^{K_i − 1 − t} · R^O_i                                  the return of turn t, discounted from the end
        S_it = clip((G_it − mean_a) / (std_a + ε), ±(m_a − 1)/√m_a)     a: trajectories of the group in the turn's state
        S_it = G_it − mean_a                                            scale="none"
        S_it = 0                                                        where all of the group have one outcome

    with mean, std (ddof = 1) and the number m of an anchor group a = (group, state) over its trajectories, each by its
    first visit. S = 0 also where they all returned the same, and where only one trajectory was in that state.

    GiGPO (https://arxiv.org/abs/2505.10978). Departures from the paper:

      * A state is the condensed context itself: the very same prompt ids, in whatever turn.
      * The paper counts every visit; here a trajectory counts once, so that coming back to a state cannot make it count
        more. Its later visits are measured by the same mean and std.
      * A group whose outcomes are all equal has no S. Only the discount would tell its returns apart: at full size
        however little γ is below 1, and for a reward below 0 in favour of the longest.
      * The clip. A value of m can lie at most (m − 1)/√m of their deviations (ddof = 1) off their mean, so no first
        visit feels it; a later visit is not among the m, and could lie thousands of deviations off where they are near
        equal.

    Biased by: what ``grpo`` is, twice over; small anchor groups, whose two or three members set their own scale; γ,
    which in one state prefers the trajectory that needs fewer turns from there, where the group's outcomes differ at
    all. The first prompt of a question is a state that all siblings share, so there S repeats the outcome; where no
    other prompt occurs twice, that is all.

    Example: outcomes [1, 0], 2 and 1 turns, states [[5, 6], [5, ·]], γ = ½, ε = 0: N = ±0.707. In state 5 the returns
    are ½·1 and 0, S = ±0.707; state 6 has one trajectory, S = 0. A = [[1.414, 0.707], [−1.414, 0]].

    Args:
        state_NK: int, labels of the states, equal within a group if and only if the prompt ids were the same; −1 beyond
            a trajectory's turns and nowhere else. Labels of different groups have nothing to do with each other.
        coef: the weight of S; 0 is ``grpo``.
        gamma: γ in [0, 1].

    Returns:
        float (N, K). S sums to zero over the first visits of a state, not over all turns.
    """
    _check_states(state_NK, batch.turns_N)
    outcome = against_group("R^O", batch.outcome_N, batch.group_N, scale=scale, eps=eps)
    return_NK = discounts(batch.turns_N, gamma) * batch.outcome_N[:, None]
    step_NK = _against_same_state(return_NK, state_NK, batch.group_N, scale=scale, eps=eps)
    step_NK = torch.where(std(batch.outcome_N, batch.group_N)[:, None] > 0, step_NK, 0.0)
    return total(outcome, Term("coef·S", coef * step_NK, {"G": return_NK, "S": step_NK}))


def _against_same_state(return_NK: Tensor, state_NK: Tensor, group_N: Tensor, *, scale: Scale, eps: float) -> Tensor:
    """S_NK, 0 beyond a trajectory's turns."""
    row_V, turn_V = (state_NK != NO_TURN).nonzero(as_tuple=True)  # trajectory by trajectory, in the order of turns
    index_N, _ = group_indices(group_N)
    # a number for every pair, equal if and only if the pairs are, counted from 0
    anchor_V, _ = group_indices(torch.stack((index_N[row_V], state_NK[row_V, turn_V]), dim=1))
    visitor_V, _ = group_indices(torch.stack((row_V, anchor_V), dim=1))  # the index in _F of the same trajectory, state
    visitors = int(visitor_V.max()) + 1 if len(visitor_V) else 0
    index_V = torch.arange(len(row_V), device=row_V.device)
    first_F = index_V.new_zeros(visitors).scatter_reduce(0, visitor_V, index_V, "amin", include_self=False)
    return_V, anchor_F = return_NK[row_V, turn_V], anchor_V[first_F]
    return_F = return_V[first_F]
    std_F = std(return_F, anchor_F)
    step_V = return_V - mean(return_F, anchor_F)[visitor_V]
    if scale == "std":
        size_F = sizes(anchor_F).double()
        bound_V = ((size_F - 1) / size_F.sqrt())[visitor_V]
        step_V = (step_V / (std_F + eps)[visitor_V]).clamp(-bound_V, bound_V)
    step_V = torch.where(std_F[visitor_V] > 0, step_V, 0.0)
    return torch.zeros_like(return_NK).index_put((row_V, turn_V), step_V)


def _check_states(state_NK: Tensor, turns_N: Tensor) -> None:
    shape = (len(turns_N), len(turn_indices(turns_N)))
    if tuple(state_NK.shape) != shape:
        raise ValueError(
            f"the estimator 'gigpo' needs state_NK of shape (trajectories, most turns of any) = {shape}, "
            f"found {tuple(state_NK.shape)}"
        )
    has_turn_NK = turn_indices(turns_N) < turns_N[:, None]
    bad = first(((state_NK != NO_TURN) != has_turn_NK).any(dim=1))
    if bad is not None:
        raise ValueError(
            f"computing advantages: the states of {name_of(bad, turns_N)} are {state_NK[bad].tolist()}, wanted a label "
            f"for each of its {turns_N[bad].item()} turns and {NO_TURN} beyond them"
        )
