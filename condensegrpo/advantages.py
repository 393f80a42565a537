"""Advantages: what a trajectory is worth against its siblings, per turn. Pure functions of tensors; torch only.

Legend of the suffixes: ``_N`` trajectories, ``_K`` turns (K = the most turns of any trajectory), ``_G`` groups.

Every estimator has the same five positional arguments, so that one can stand for another:

    outcome_N      float, R^O, the reward of the whole trajectory
    turn_N         float, R^T, the sum of its turn rewards
    group_N        int, the group of each trajectory: any labels, in any order
    turns_N        int, how many turns it has
    result_turn_N  int, the first turn whose observation carried a tool result; −1: none

and returns advantage_NK: float of the outcome's type, 0 beyond ``turns_N``. Statistics are over the trajectories of a
group, each counted once however many turns or rows it made, with ddof = 1. Nothing here ever returns NaN.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from condensegrpo.errors import ScoreError

Scale = Literal["std", "none"]


def grpo(
    outcome_N: Tensor,
    turn_N: Tensor,
    group_N: Tensor,
    turns_N: Tensor,
    result_turn_N: Tensor,
    *,
    scale: Scale = "std",
    singleton: Literal["zero", "raw"] = "zero",
    eps: float = 1e-6,
) -> Tensor:
    """The outcome against the mean of its group, one scalar for all turns of a trajectory.

    A_i = (R_i − mean_g) / (std_g + ε),  g = group_N[i]

    GRPO (https://arxiv.org/abs/2402.03300, sec. 4.1.2) divides by std; ``scale="none"`` is Dr. GRPO
    (https://arxiv.org/abs/2503.20783), which does not, since that weighs easy and hard questions more than the rest.
    Equal rewards give exactly 0. A group of one gives 0, or with ``singleton="raw"`` its own reward.

    Example: outcomes [1, 1, 1, 0] in one group have mean ¾ and std ½, and give [½, ½, ½, −1½].

    Returns:
        float (N, K), constant over the turns of a trajectory, summing to zero over a group's trajectories.

    Raises:
        ScoreError: a reward is NaN or infinite.
    """
    _check(outcome_N, turn_N, group_N, turns_N, result_turn_N)
    reward_N = outcome_N.double()
    advantage_N = _normalise(reward_N, group_N, scale=scale, eps=eps)
    if singleton == "raw":
        index_N, size_G = _groups(group_N)
        advantage_N = torch.where(size_G[index_N] == 1, reward_N, advantage_N)
    return _over_turns(advantage_N, turns_N, like=outcome_N)


def efficient(
    outcome_N: Tensor,
    turn_N: Tensor,
    group_N: Tensor,
    turns_N: Tensor,
    result_turn_N: Tensor,
    *,
    context_N: Tensor,
    context_low: float,
    context_high: float,
    coefficient: float = 0.2,
    guard: float = 0.25,
    min_pass_rate: float = 0.0,
    accuracy: Scale = "std",
    truncated_N: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Accuracy first, then context efficiency among the correct, decoupled so that one cannot drown the other.

        u_i = clip(ln(C_i/C_lo) / ln(C_hi/C_lo), 0, 1)                                  cost of the context, 0 is cheap
        E_i = 1[r_i=1] · clip((mean u − u_i) / max(std u, 0.1), −1, 1)                  mean, std over the correct of g
        A_i = A_acc + λ·g(p)·E_i,   g(p) = p if p ≥ p_min else 0                        p: the group's share of r = 1
        r_i < 1 ⇒ A_i = A_acc;      A_acc > 0 ⇒ A_i ≥ κ·A_acc                           the guard

    with A_acc = N(r), or r − mean for ``accuracy="none"``. E is 0 in a group with fewer than two correct trajectories,
    and for a trajectory that was truncated in an emergency. In an all-correct group A_acc = 0 and the guard does not
    bite: there the shorter contexts win. A correct trajectory never falls below κ·A_acc for being long.

    Example: outcomes [1, 1, 0, 0], contexts [100, 1000, 100, 100], anchors 100 and 1000, ``accuracy="none"``: u of the
    correct is 0 and 1, mean ½, std 0.71, E = ±0.71; λ·p·E = ±0.071, so A = [0.571, 0.429, −0.5, −0.5].

    Args:
        outcome_N: r in [0, 1]; only r = 1 counts as correct.
        context_N: C, the largest context of any turn, in tokens.
        context_low: C_lo in tokens, at which a context costs nothing; from the configuration, never from the group.
        context_high: C_hi in tokens, at which it costs all.
        coefficient: λ ≥ 0.
        guard: κ in [0, 1].
        min_pass_rate: p_min in [0, 1].
        truncated_N: bool, trajectories that earn no E but count in its mean and std; None: there are none.

    Returns:
        float (N, K), constant over the turns of a trajectory.

    Raises:
        ScoreError: an outcome is NaN, infinite or outside [0, 1].
    """
    _check(outcome_N, turn_N, group_N, turns_N, result_turn_N)
    _check_unit_interval(outcome_N)
    reward_N = outcome_N.double()
    accuracy_N = _normalise(reward_N, group_N, scale=accuracy, eps=eps)
    correct_N = reward_N == 1
    cost_N = _context_cost(context_N, low=context_low, high=context_high)
    saving_N = _saving(cost_N, correct_N, group_N)
    if truncated_N is not None:
        saving_N = saving_N.masked_fill(truncated_N, 0.0)
    pass_rate_N = _mean(correct_N.double(), group_N)
    trust_N = torch.where(pass_rate_N >= min_pass_rate, pass_rate_N, 0.0)
    advantage_N = accuracy_N + coefficient * trust_N * saving_N
    guarded_N = torch.where(accuracy_N > 0, torch.maximum(advantage_N, guard * accuracy_N), advantage_N)
    return _over_turns(torch.where(correct_N, guarded_N, accuracy_N), turns_N, like=outcome_N)


ESTIMATORS: Mapping[str, Callable[..., Tensor]] = {"grpo": grpo, "efficient": efficient}


def _context_cost(context_N: Tensor, *, low: float, high: float) -> Tensor:
    """u_N: the logarithm of the context between its anchors, 0 at ``low`` and below, 1 at ``high`` and above."""
    if not 0 < low < high:
        raise ValueError(f"the context anchors must satisfy 0 < context_low < context_high, found {low} and {high}")
    return (context_N.double().clamp(low, high) / low).log() / torch.tensor(high / low, dtype=torch.float64).log()


def _saving(cost_N: Tensor, correct_N: Tensor, group_N: Tensor) -> Tensor:
    """E_N: how much cheaper than its correct siblings a correct trajectory was, in their deviations; within [−1, 1]."""
    index_N, _ = _groups(group_N)
    correct_cost_N = cost_N[correct_N]
    index_C = index_N[correct_N]  # of the correct only, in the labels of all groups
    saving_C = (_mean(correct_cost_N, index_C) - correct_cost_N) / _std(correct_cost_N, index_C).clamp(min=0.1)
    return torch.zeros_like(cost_N).masked_scatter(correct_N, saving_C.clamp(-1, 1))


def _normalise(value_N: Tensor, group_N: Tensor, *, scale: Scale, eps: float) -> Tensor:
    centred_N = value_N - _mean(value_N, group_N)
    return centred_N if scale == "none" else centred_N / (_std(value_N, group_N) + eps)


def _groups(group_N: Tensor) -> tuple[Tensor, Tensor]:
    """Labels as positions (N,) in the list of groups, and the size (G,) of every group."""
    _, index_N, size_G = torch.unique(group_N, return_inverse=True, return_counts=True)
    return index_N, size_G


def _mean(value_N: Tensor, group_N: Tensor) -> Tensor:
    """The mean of each one's group (N,). Equal values give themselves to the bit, so that centring gives exactly 0."""
    index_N, size_G = _groups(group_N)
    zero_G = value_N.new_zeros(len(size_G))
    low_G = zero_G.scatter_reduce(0, index_N, value_N, "amin", include_self=False)
    above_G = zero_G.index_add(0, index_N, value_N - low_G[index_N])
    return (low_G + above_G / size_G)[index_N]


def _std(value_N: Tensor, group_N: Tensor) -> Tensor:
    """The standard deviation (ddof = 1) of each one's group (N,); 0 for a group of one."""
    index_N, size_G = _groups(group_N)
    square_N = (value_N - _mean(value_N, group_N)).square()
    total_G = value_N.new_zeros(len(size_G)).index_add(0, index_N, square_N)
    return (total_G / (size_G - 1).clamp(min=1)).sqrt()[index_N]


def _over_turns(advantage_N: Tensor, turns_N: Tensor, *, like: Tensor) -> Tensor:
    """One scalar for all turns of a trajectory: (N, K), 0 beyond its turns, in the floating type of ``like``."""
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    longest = int(turns_N.max()) if len(turns_N) else 0
    has_turn_NK = torch.arange(longest, device=turns_N.device) < turns_N[:, None]
    return torch.where(has_turn_NK, advantage_N[:, None], 0.0).to(dtype)


def _check(outcome_N: Tensor, turn_N: Tensor, group_N: Tensor, turns_N: Tensor, result_turn_N: Tensor) -> None:
    shapes = [tuple(value.shape) for value in (outcome_N, turn_N, group_N, turns_N, result_turn_N)]
    if len(set(shapes)) != 1 or outcome_N.dim() != 1:
        raise ValueError(f"an estimator needs five tensors of one shape (N,), found {shapes}")
    for name, reward_N in (("outcome", outcome_N), ("turn", turn_N)):
        bad = (~reward_N.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise ScoreError(
                f"computing advantages: the {name} reward of trajectory {bad[0]} (of {len(reward_N)}, counted from 0) "
                f"is {reward_N[bad[0]].item()}, wanted a finite number. One such value would poison its whole group: "
                f"mend the reward function, or leave the trajectory out."
            )


def _check_unit_interval(outcome_N: Tensor) -> None:
    bad = ((outcome_N < 0) | (outcome_N > 1)).nonzero().flatten().tolist()
    if bad:
        raise ScoreError(
            f"computing advantages: the outcome of trajectory {bad[0]} (of {len(outcome_N)}, counted from 0) is "
            f"{outcome_N[bad[0]].item()}, wanted a correctness in [0, 1]. The estimator 'efficient' adds the context "
            f"term itself: give it the correctness, or use the estimator 'grpo' for a composed reward."
        )
