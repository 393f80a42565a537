"""Whitening: the advantages of a whole batch on one scale, whatever estimator they came from. Torch only.

Suffixes as in ``condensegrpo.algorithms.advantages``.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from condensegrpo.algorithms.advantages.groups import first, name_of
from condensegrpo.core.errors import ScoreError
from condensegrpo.core.trajectory import MAX_REWARD

EQUAL = 1e-12  # of Σ A²: what squares may spread by and still be equal; sums in double precision err by far less


class Moments(NamedTuple):
    """Sums over the trained tokens of a batch. Those of the ranks add up field by field."""

    tokens: float  # Σ n_it, sampled tokens
    total: float  # Σ n_it·A_it
    square: float  # Σ n_it·A_it²


def moments(advantage_NK: Tensor, tokens_NK: Tensor) -> Moments:
    """The moments of some trajectories, each turn counted by its sampled tokens.

    Args:
        advantage_NK: float, of every turn; whatever stands at a turn without tokens is left out.
        tokens_NK: int, sampled tokens of every turn, 0 beyond the trajectory's turns.

    Raises:
        ScoreError: the advantage of a turn with tokens is NaN, infinite or beyond ±1e100.
        ValueError: shapes differ, or a number of tokens is negative.
    """
    count_NK, value_NK = _trained(advantage_NK, tokens_NK)
    return Moments(
        tokens=float(count_NK.sum()),
        total=float((count_NK * value_NK).sum()),
        square=float((count_NK * value_NK.square()).sum()),
    )


def whiten(advantage_NK: Tensor, tokens_NK: Tensor, *, moments: Moments, eps: float = 1e-8) -> Tensor:
    """Advantages less their mean over the trained tokens of the whole batch, in their deviations.

        A'_it = (A_it − mean) / (std + ε)   where n_it > 0, else 0
        mean = Σ n·A / T,   std² = (Σ n·A² − (Σ n·A)² / T) / (T − 1),   T = Σ n

    Global advantage normalisation, as in REINFORCE++ (https://arxiv.org/abs/2501.03262). Fewer than two tokens give 0,
    and so do equal advantages: those whose std is below a millionth of their root mean square, which sums of squares
    cannot tell from none.

    Biased by, and so off by default: ΣA = 0 within a group is broken, since the mean of the batch counts tokens and is
    not 0; a trajectory with an advantage of 0, such as those of a group without signal, gets one that is not 0 and has
    to be trained; long trajectories count more in mean and std, by their tokens.

    Example: advantages [1, −1] with 3 and 1 tokens: mean (3 − 1)/4 = ½, std² = (4 − 4/4)/3 = 1, A' = [½, −1½].

    Args:
        advantage_NK: float, of every turn.
        tokens_NK: int, sampled tokens of every turn, 0 beyond the trajectory's turns.
        moments: of the whole batch over all ranks, and not of these N trajectories alone.

    Returns:
        float (N, K) of the advantage's type, 0 where there are no tokens.

    Raises:
        ScoreError: the advantage of a turn with tokens is NaN, infinite or beyond ±1e100.
        ValueError: shapes differ, or a number of tokens is negative.
    """
    count_NK, value_NK = _trained(advantage_NK, tokens_NK)
    spread = moments.square - moments.total**2 / max(moments.tokens, 1.0)
    if moments.tokens < 2 or spread <= EQUAL * moments.square:
        return torch.zeros_like(advantage_NK)
    deviation = math.sqrt(spread / (moments.tokens - 1))
    whitened_NK = (value_NK - moments.total / moments.tokens) / (deviation + eps)
    return torch.where(count_NK > 0, whitened_NK, 0.0).to(advantage_NK.dtype)


def _trained(advantage_NK: Tensor, tokens_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Token counts and advantages in float64, the latter 0 where there are no tokens."""
    if advantage_NK.shape != tokens_NK.shape or advantage_NK.dim() != 2:
        raise ValueError(
            f"whitening needs advantages and token counts of one shape (N, K), "
            f"found {tuple(advantage_NK.shape)} and {tuple(tokens_NK.shape)}"
        )
    bad = first((tokens_NK < 0).any(dim=1))
    if bad is not None:
        raise ValueError(
            f"whitening advantages: {name_of(bad, tokens_NK)} has {tokens_NK[bad].tolist()} tokens in its turns, "
            f"wanted 0 or more"
        )
    value_NK = torch.where(tokens_NK > 0, advantage_NK.double(), 0.0)
    bad = first(~(value_NK.abs() <= MAX_REWARD).all(dim=1))
    if bad is not None:
        raise ScoreError(
            f"whitening advantages: {name_of(bad, tokens_NK)} has the advantages {advantage_NK[bad].tolist()}, wanted "
            f"finite numbers of magnitude {MAX_REWARD:g} at most. It would invalidate the whole batch."
        )
    return tokens_NK.double(), value_NK
