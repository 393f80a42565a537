"""The weight of a trained token in the optimiser step's loss. Pure functions of tensors; torch only.

Legend of the suffixes: ``_N`` trajectories, ``_K`` turns.

What divides by what: totals are those of the whole optimiser step, over all ranks and micro-batches, and count
trajectories that carry no signal too. No weight depends on the rows or micro-batches that a trajectory was cut into.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from condensegrpo.algorithms.settings import Aggregation


class Totals(NamedTuple):
    """The denominators: what one optimiser step holds, over all ranks. Those of the ranks add up field by field."""

    trajectories: float  # B, those without turns or without signal included
    turns: float  # Σ K_i
    tokens: float  # Σ N_i, sampled tokens


def totals(tokens_NK: Tensor, turns_N: Tensor) -> Totals:
    """The totals of some trajectories.

    Args:
        tokens_NK: sampled tokens of each turn, 0 beyond the trajectory's turns.
        turns_N: how many turns it has; a turn that sampled nothing counts.

    Raises:
        ValueError: a count is negative.
    """
    _check_counts("adding up the totals of trajectories", tokens_NK=tokens_NK, turns_N=turns_N)
    return Totals(trajectories=len(turns_N), turns=float(turns_N.sum()), tokens=float(tokens_NK.sum()))


def token_weights(mode: Aggregation, tokens_NK: Tensor, *, totals: Totals, max_tokens: float | None = None) -> Tensor:
    """The weight in the optimiser step's loss of each trained token of turn t of trajectory i.

    With n_it sampled tokens in the turn and N_i in the trajectory:

        trajectory_constant  1 / (B·L)          L = max_tokens, a constant: Dr. GRPO over the trajectory, unbiased
        trajectory_mean      1 / (B·N_i)        every trajectory weighs the same
        token_mean           1 / Σ_i N_i        every token weighs the same (DAPO)
        turn_mean            1 / (ΣK_i · n_it)  every turn weighs the same; rewards splitting turns, for parity only

    Args:
        tokens_NK: sampled tokens n_it, 0 beyond the trajectory's turns.
        totals: B, ΣK_i and ΣN_i of the whole optimiser step over all ranks, and not of these N trajectories alone.
        max_tokens: L > 0, which only ``trajectory_constant`` needs.

    Returns:
        float64 (N, K), 0 for a turn that sampled nothing and beyond the trajectory's turns.

    Raises:
        ValueError: a count or a total is negative, or ``max_tokens`` is missing or not above 0.
    """
    _check_counts("weighing tokens", tokens_NK=tokens_NK)
    if not all(0 <= total < math.inf for total in totals):
        raise ValueError(
            f"weighing tokens: found {totals}, wanted finite counts >= 0: those of all trajectories, turns and tokens "
            f"of the optimiser step over all ranks."
        )
    count_NK = tokens_NK.double()
    weight_NK = WEIGHTS[mode](count_NK, totals, max_tokens)
    return torch.where(count_NK > 0, weight_NK, 0.0)


def summary_weight(weight_NK: Tensor, tokens_NK: Tensor, condense_NK: Tensor) -> tuple[float, float]:
    """The weight of all tokens, and that of the tokens of condense turns: Σ w·n over some trajectories.

    The sums of the ranks add up.

    Args:
        condense_NK: bool, whether the turn wrote a summary.
    """
    mass_NK = weight_NK * tokens_NK
    return float(mass_NK.sum()), float(mass_NK[condense_NK].sum())


def with_summary_share(
    weight_NK: Tensor, condense_NK: Tensor, *, share: float, total: float, summaries: float
) -> Tensor:
    """The weights scaled so that the tokens of condense turns have a share s of all weight; the sum stays the same.

        w · s·W/W_c in condense turns, w · (1 − s)·W/(W − W_c) in the others

    Without weight on one of the two kinds the weights are returned unchanged.

    Args:
        weight_NK: of ``token_weights``.
        condense_NK: bool.
        share: s in [0, 1].
        total: W, of the whole optimiser step over all ranks, see ``summary_weight``.
        summaries: W_c, likewise.
    """
    if not 0 < summaries < total:
        return weight_NK
    return weight_NK * torch.where(condense_NK, share * total / summaries, (1 - share) * total / (total - summaries))


def _check_counts(doing: str, **counts: Tensor) -> None:
    for name, count in counts.items():
        bad = (~(count >= 0)).nonzero().tolist()  # NaN included
        if bad:
            raise ValueError(
                f"{doing}: {name}{bad[0]} is {count[tuple(bad[0])].item()}, wanted a count >= 0: a turn that sampled "
                f"nothing has 0 tokens, and so has an entry beyond the trajectory's turns."
            )


def _trajectory_constant(count_NK: Tensor, totals: Totals, max_tokens: float | None) -> Tensor:
    if max_tokens is None or not 0 < max_tokens < math.inf:
        raise ValueError(f"the aggregation trajectory_constant needs max_tokens > 0, found {max_tokens}")
    return torch.full_like(count_NK, 1 / (max(totals.trajectories, 1) * max_tokens))


def _trajectory_mean(count_NK: Tensor, totals: Totals, max_tokens: float | None) -> Tensor:
    length_N1 = count_NK.sum(dim=1, keepdim=True).clamp(min=1)
    return (1 / (max(totals.trajectories, 1) * length_N1)).expand_as(count_NK)


WEIGHTS: Mapping[str, Callable[[Tensor, Totals, float | None], Tensor]] = {
    "trajectory_constant": _trajectory_constant,
    "trajectory_mean": _trajectory_mean,
    "token_mean": lambda count_NK, totals, _: torch.full_like(count_NK, 1 / max(totals.tokens, 1)),
    "turn_mean": lambda count_NK, totals, _: 1 / (max(totals.turns, 1) * count_NK.clamp(min=1)),
}
