"""From numbers of trajectories to the table of their turns (N, K): the last step of every estimator. Torch only.

Suffixes as in ``condensegrpo.algorithms.advantages``.
"""

import torch
from torch import Tensor

from condensegrpo.algorithms.advantages.groups import first, name_of
from condensegrpo.core.errors import ScoreError

MAX_ADVANTAGE = torch.finfo(torch.float32).max  # losses are computed in single precision


def turn_indices(turns_N: Tensor) -> Tensor:
    """t = 0, 1, … up to the most turns of any trajectory, int (K,)."""
    longest = int(turns_N.max()) if len(turns_N) else 0
    return torch.arange(longest, device=turns_N.device)


def before_result(turns_N: Tensor, result_turn_N: Tensor) -> Tensor:
    """b(t), bool (N, K): turn t is sampled before its trajectory's first tool result is seen.

    t ≤ result_turn: the turn that called the tool belongs to it. False everywhere without a result (−1). By the index
    of the turn, and never by where a mask of tokens changes: a turn without tokens, or two that touch, would shift it.
    """
    return turn_indices(turns_N) <= result_turn_N[:, None]


def discounts(turns_N: Tensor, gamma: float) -> Tensor:
    """γ^{K_i−1−t}, float64 (N, K): 1 at a trajectory's last turn, for γ = 0 too, less before; meaningless beyond it."""
    left_NK = turns_N[:, None] - 1 - turn_indices(turns_N)
    return torch.tensor(gamma, dtype=torch.float64, device=turns_N.device) ** left_NK


def finished(advantage_NK: Tensor, turns_N: Tensor, *, like: Tensor) -> Tensor:
    """The table as an estimator returns it: 0 beyond a trajectory's turns, in the floating type of ``like``.

    Args:
        advantage_NK: float (N, K), or (N, 1) for one number on all turns.
        turns_N: int.
        like: outcome_N.

    Raises:
        ScoreError: an advantage does not fit into that type, or into single precision, which losses are computed in.
    """
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    has_turn_NK = turn_indices(turns_N) < turns_N[:, None]
    exact_NK = torch.where(has_turn_NK, advantage_NK, 0.0)
    largest = min(torch.finfo(dtype).max, MAX_ADVANTAGE)
    bad = first(~(exact_NK.abs() <= largest).all(dim=1))  # NaN included
    if bad is not None:
        divided = "" if exact_NK[bad].isfinite().all() else ", or divide by nothing that may be 0"
        raise ScoreError(
            f"computing advantages: {name_of(bad, turns_N)} gets {exact_NK[bad].tolist()}, wanted numbers of magnitude "
            f"{largest:.3g} at most, or rows and losses cannot hold them. Its outcome reward is {like[bad].item()}: "
            f"scale the rewards of its group, or the estimator's options, down{divided}."
        )
    return exact_NK.to(dtype)
