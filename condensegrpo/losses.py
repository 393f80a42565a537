"""Losses per trained token, and the weights that add them up. Pure functions of tensors; torch only.

Legend of the suffixes: ``_T`` trained tokens, ``_N`` trajectories, ``_K`` turns.

The loss of an optimiser step is Σ w·l over the trained tokens of all its micro-batches on all ranks. Every weight is
fixed before the first micro-batch from totals over the whole step, so that no micro-batch divides by anything of its
own: the gradient is the same however the rows are packed, ordered or shared out.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # nats; e^20 = 5e8 is finite in float32 and bfloat16
Aggregation = Literal["trajectory_constant", "trajectory_mean", "token_mean", "turn_mean"]


class TokenLoss(NamedTuple):
    """The loss of every trained token, with statistics that carry no gradient; sum them, then divide by the tokens."""

    loss_T: Tensor  # float, not yet weighted
    ratio_T: Tensor  # float, π(token) / π_old(token)
    low_T: Tensor  # bool, a token held down (A < 0) whose ratio is below its lower bound: it gets no gradient
    high_T: Tensor  # bool, a token whose ratio is above its upper bound (A > 0, or A < 0 and a dual clip): no gradient


def clipped(
    logp_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate (https://arxiv.org/abs/1707.06347, eq. 7), with bounds of their own on either side.

        ρ = exp(clip(logp − old, ±20))
        l = −min(ρ·A, clip(ρ, 1 − low, 1 + high)·A)
        dual clip (https://arxiv.org/abs/1912.09729):  l = min(l, −c·A)  where A < 0

    A token sampled under the very weights that learn has ρ = 1 and the gradient −A·∇logp.

    Args:
        logp_T: float, nats, log-probability of the token under the weights that learn; carries the gradient.
        old_T: float, nats, under the weights it was sampled from; no gradient.
        advantage_T: float, of the token's turn; no gradient.
        clip_low: the ratio's lower bound is 1 − clip_low, for A < 0.
        clip_high: the ratio's upper bound is 1 + clip_high, for A > 0.
        dual_clip: c > 1, the ratio's upper bound for A < 0; None: no such bound.
    """
    ratio_T = (logp_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss_T = torch.maximum(-ratio_T * advantage_T, -ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantage_T)
    still_T = ratio_T.detach()
    low_T = (advantage_T < 0) & (still_T < 1 - clip_low)
    high_T = (advantage_T > 0) & (still_T > 1 + clip_high)
    if dual_clip is not None:
        loss_T = torch.where(advantage_T < 0, torch.minimum(loss_T, -dual_clip * advantage_T), loss_T)
        high_T = high_T | ((advantage_T < 0) & (still_T > dual_clip))
    return TokenLoss(loss_T=loss_T, ratio_T=still_T, low_T=low_T, high_T=high_T)


def nll(logp_T: Tensor) -> TokenLoss:
    """l = −logp, for supervised steps: the token is right and there is no distribution that it was sampled from.

    Args:
        logp_T: float, nats, under the weights that learn; carries the gradient.
    """
    never_T = torch.zeros_like(logp_T, dtype=torch.bool)
    return TokenLoss(loss_T=-logp_T, ratio_T=torch.ones_like(logp_T).detach(), low_T=never_T, high_T=never_T)


LOSSES: Mapping[str, Callable[..., TokenLoss]] = {"clipped": clipped}


class Totals(NamedTuple):
    """The denominators: what one optimiser step holds, over all ranks. The ranks' own totals add up field by field."""

    trajectories: float  # B, those without turns or without signal included
    turns: float  # Σ K_i
    tokens: float  # Σ N_i, sampled tokens


def totals(tokens_NK: Tensor, turns_N: Tensor) -> Totals:
    """The totals of the trajectories at hand.

    Args:
        tokens_NK: sampled tokens of each turn, 0 beyond the trajectory's turns.
        turns_N: how many turns it has; a turn that sampled nothing counts.
    """
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
    """
    count_NK = tokens_NK.double()
    weight_NK = WEIGHTS[mode](count_NK, totals, max_tokens)
    return torch.where(count_NK > 0, weight_NK, 0.0)


def _trajectory_constant(count_NK: Tensor, totals: Totals, max_tokens: float | None) -> Tensor:
    if max_tokens is None or max_tokens <= 0:
        raise ValueError(f"the aggregation trajectory_constant needs max_tokens > 0, found {max_tokens}")
    return torch.full_like(count_NK, 1 / (max(totals.trajectories, 1) * max_tokens))


def _trajectory_mean(count_NK: Tensor, totals: Totals, max_tokens: float | None) -> Tensor:
    length_N1 = count_NK.sum(dim=1, keepdim=True).clamp(min=1)
    return (1 / (max(totals.trajectories, 1) * length_N1)).expand_as(count_NK)


def _token_mean(count_NK: Tensor, totals: Totals, max_tokens: float | None) -> Tensor:
    return torch.full_like(count_NK, 1 / max(totals.tokens, 1))


def _turn_mean(count_NK: Tensor, totals: Totals, max_tokens: float | None) -> Tensor:
    return 1 / (max(totals.turns, 1) * count_NK.clamp(min=1))


WEIGHTS: Mapping[str, Callable[[Tensor, Totals, float | None], Tensor]] = {
    "trajectory_constant": _trajectory_constant,
    "trajectory_mean": _trajectory_mean,
    "token_mean": _token_mean,
    "turn_mean": _turn_mean,
}
