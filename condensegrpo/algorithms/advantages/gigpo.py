"""Credit between turns that were given the very same context (GiGPO's anchor states). Torch only.

Arguments and suffixes as in ``condensegrpo.algorithms.advantages``; further ``_V`` visits (turns of all trajectories in
one list) and ``_F`` first visits (one for every trajectory and state that it was in).

Departures from the paper, https://arxiv.org/abs/2505.10978:

  * A state is the condensed context itself: the very same prompt ids. Which turn it was plays no part.
  * The paper counts every visit; here a trajectory counts once, so that coming back to a state cannot make it count
    more. Its later visits are measured by the same mean and std.
  * A group whose outcomes are all equal has no S. Only the discount would tell its returns apart: at full size however
    little γ is below 1, and for a reward below 0 in favour of the longest.
  * The clip. By (m − 1)/√m a value of m can at most lie off their mean in their own deviations (ddof = 1), so no first
    visit feels it; a later visit is none of the m, and could lie thousands of deviations off where they are near equal.
"""

from typing import Annotated, NamedTuple

import torch
from annotated_types import Ge, Le
from torch import Tensor

from condensegrpo.algorithms.advantages.estimator import Batch, Estimate, Term, against_group, estimator, total
from condensegrpo.algorithms.advantages.groups import (
    Epsilon,
    Scale,
    first,
    group_indices,
    mean,
    name_of,
    sizes,
    std,
)
from condensegrpo.algorithms.advantages.table import discounts, turn_indices

NO_TURN = -1  # the state beyond a trajectory's turns


@estimator(
    summary="grpo, plus a comparison of turns sampled from the same context",
)
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

    GiGPO (https://arxiv.org/abs/2505.10978). The module says where this departs from the paper: a state is a context,
    a trajectory counts once in it, later visits are clipped, and equal outcomes say nothing.

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

    Raises:
        ValueError: also for a state that is out of range.
    """
    _check_states(state_NK, batch.turns_N)
    outcome = against_group("R^O", batch.outcome_N, batch.group_N, scale=scale, eps=eps)
    return_NK = discounts(batch.turns_N, gamma) * batch.outcome_N[:, None]
    step_NK = _against_same_state(return_NK, _visits(state_NK, batch.group_N), scale=scale, eps=eps)
    step_NK = torch.where(std(batch.outcome_N, batch.group_N)[:, None] > 0, step_NK, 0.0)
    return total(outcome, Term("coef·S", coef * step_NK, {"G": return_NK, "S": step_NK}))


class _Visits(NamedTuple):
    """All turns as one list, trajectory by trajectory in the order of their turns."""

    row_V: Tensor  # int, the trajectory
    turn_V: Tensor  # int, the turn
    visitor_V: Tensor  # int, index in the lists _F of the trajectory's first visit to the same state
    first_F: Tensor  # int, index in the lists _V of a first visit
    anchor_F: Tensor  # int, the anchor group of a first visit


def _visits(state_NK: Tensor, group_N: Tensor) -> _Visits:
    """Every turn with the first visit of its trajectory to its state."""
    row_V, turn_V = (state_NK != NO_TURN).nonzero(as_tuple=True)
    index_N, _ = group_indices(group_N)
    anchor_V = _labels(index_N[row_V], state_NK[row_V, turn_V])
    visitor_V = _labels(row_V, anchor_V)
    visitors = int(visitor_V.max()) + 1 if len(visitor_V) else 0
    index_V = torch.arange(len(row_V), device=row_V.device)
    first_F = index_V.new_zeros(visitors).scatter_reduce(0, visitor_V, index_V, "amin", include_self=False)
    return _Visits(row_V=row_V, turn_V=turn_V, visitor_V=visitor_V, first_F=first_F, anchor_F=anchor_V[first_F])


def _labels(left_V: Tensor, right_V: Tensor) -> Tensor:
    """A number for every pair, equal if and only if the pairs are, counted from 0."""
    pair_V2 = torch.stack((left_V, right_V), dim=1)
    return group_indices(pair_V2)[0]


def _against_same_state(return_NK: Tensor, visits: _Visits, *, scale: Scale, eps: float) -> Tensor:
    """S_NK, 0 beyond a trajectory's turns."""
    return_V = return_NK[visits.row_V, visits.turn_V]
    return_F = return_V[visits.first_F]
    std_F = std(return_F, visits.anchor_F)
    size_F = sizes(visits.anchor_F).double()
    step_V = return_V - mean(return_F, visits.anchor_F)[visits.visitor_V]
    if scale == "std":
        bound_V = ((size_F - 1) / size_F.sqrt())[visits.visitor_V]
        step_V = (step_V / (std_F + eps)[visits.visitor_V]).clamp(-bound_V, bound_V)
    step_V = torch.where(std_F[visits.visitor_V] > 0, step_V, 0.0)
    return torch.zeros_like(return_NK).index_put((visits.row_V, visits.turn_V), step_V)


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
