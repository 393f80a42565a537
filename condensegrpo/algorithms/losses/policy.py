"""The loss of a trained token, from its log-probability and its advantage. Pure functions of tensors; torch only.

Legend of the suffixes: ``_T`` trained tokens.

All columns are (T,), of trained tokens only, and T may be 0:

    logp_T       float, nats, log-probability of the token under the weights that learn; carries the gradient
    old_T        float, nats, under the weights it was sampled from; no gradient
    advantage_T  float, of the token's turn; no gradient

The weight of a token's loss is computed in ``weights.py``. A token of probability 0 for the learner (logp = −inf) has
no gradient under any of these losses; one of probability 0 for the sampler alone has the largest ratio.
"""

from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from condensegrpo.algorithms.losses.columns import bounded_exp, log_ratio, turn_sum
from condensegrpo.algorithms.losses.loss import TokenLoss, loss

LowerBound = Annotated[float, Ge(0), Le(1)]  # the ratio's lower bound is 1 less this
UpperBound = Annotated[float, Ge(0)]  # the ratio's upper bound is 1 more than this


@loss(summary="PPO's surrogate, clipped per token (default)", formula="l = −min(ρ·A, clip(ρ, 1 − low, 1 + high)·A)")
def clipped(
    logp_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: LowerBound = 0.2,
    clip_high: UpperBound = 0.2,
    dual_clip: Annotated[float, Gt(1)] | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate (https://arxiv.org/abs/1707.06347, eq. 7), with bounds of their own on either side.

        ρ = exp(clip(logp − old, ±20))
        l = −min(ρ·A, clip(ρ, 1 − low, 1 + high)·A)
        dual clip (https://arxiv.org/abs/1912.09729):  l = min(l, −c·A)  where A < 0

    A token sampled under the very weights that learn has ρ = 1 and the gradient −A·∇logp.

    Args:
        clip_low: in [0, 1]; the ratio's lower bound is 1 − clip_low, for A < 0.
        clip_high: at least 0; the ratio's upper bound is 1 + clip_high, for A > 0.
        dual_clip: c > 1, the ratio's upper bound for A < 0; None: no such bound.
    """
    ratio_T = bounded_exp(log_ratio(logp_T, old_T))
    value = _surrogate(ratio_T, advantage_T, clip_low, clip_high)
    if dual_clip is None:
        return value
    loss_T = torch.where(advantage_T < 0, torch.minimum(value.loss_T, -dual_clip * advantage_T), value.loss_T)
    high_T = value.high_T | ((advantage_T < 0) & (value.ratio_T > dual_clip))
    return value._replace(loss_T=loss_T, high_T=high_T)


@loss(
    summary="clipped per turn, by the turn's mean ratio",
    formula="""s = exp(clip(1/n · Σ_turn (logp − old), ±20))
l = −min(s·A, clip(s, 1 − low, 1 + high)·A)""",
)
def gspo(
    logp_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    *,
    turn_T: Tensor,
    clip_low: LowerBound = 3e-4,
    clip_high: UpperBound = 4e-4,
) -> TokenLoss:
    """GSPO (https://arxiv.org/abs/2507.18071, sec. 4) with the turn as the sequence: one ratio for all of its tokens.

        s = exp(clip(1/n · Σ_turn (logp − old), ±20))         n tokens in the turn
        l = −min(s·A, clip(s, 1 − low, 1 + high)·A)           for each of them

    The turn is the sequence because it is what was sampled from one context; the next turn's is fresh. s is a geometric
    mean, hence bounds as narrow as the paper's (3e-4 and 4e-4, sec. 5.1).

    The gradient flows through s. With equal weights w, a turn's tokens add up to −w·n·s·A, and since ∇s = s/n · Σ∇logp,
    the gradient is −w·s·A·Σ∇logp: as large as that of a token-level loss, whatever n. Unequal weights within a turn
    (an importance correction per token) act by their mean.

    Example: a turn of two tokens with logp − old = ln 4 and 0 has s = 2. With A = 1 and clip_high = 1 each token's loss
    is −2 and, for w = 1, the gradient of either logp is −2.

    Args:
        turn_T: int, the token's turn: any labels, one for all tokens of a turn and no two turns the same. All tokens of
            a turn must be in the micro-batch.
        clip_low: in [0, 1]; the turn ratio's lower bound is 1 − clip_low, for A < 0.
        clip_high: at least 0; the turn ratio's upper bound is 1 + clip_high, for A > 0.
    """
    log_ratio_T = log_ratio(logp_T, old_T)
    size_T = turn_sum(torch.ones_like(log_ratio_T), turn_T)
    return _surrogate(bounded_exp(turn_sum(log_ratio_T, turn_T) / size_T), advantage_T, clip_low, clip_high)


@loss(
    summary="the ratio bounded as a constant weight, no token without gradient",
    formula="l = −sg(clip(ρ, 1 − low, 1 + high))·A·logp            sg: without gradient",
)
def cispo(
    logp_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    *,
    clip_low: LowerBound = 1.0,
    clip_high: UpperBound = 4.0,
) -> TokenLoss:
    """CISPO (MiniMax-M1, https://arxiv.org/abs/2506.13585): the ratio is bounded, and no token loses its gradient.

        ρ = exp(clip(logp − old, ±20))
        l = −sg(clip(ρ, 1 − low, 1 + high))·A·logp            sg: without gradient

    The gradient is −clip(ρ, 1 − low, 1 + high)·A·∇logp, and ρ > 0: a rare token that the update made likely is held to
    a factor, where ``clipped`` drops it. The defaults leave the lower side open, as the paper does, and bound ρ by 5; a
    lower bound above 0 would push on tokens that the policy has already moved away from.

    Example: logp = ln ½ with ρ = 8 and A = 1 has the factor 5: loss 5·ln 2 = 3.47, gradient −5.

    Args:
        clip_low: in [0, 1]; the factor's lower bound is 1 − clip_low; 1: none.
        clip_high: at least 0; the factor's upper bound is 1 + clip_high.
    """
    ratio_T = bounded_exp(log_ratio(logp_T.detach(), old_T))
    factor_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(
        loss_T=_likelihood(logp_T, factor_T * advantage_T),
        ratio_T=ratio_T,
        low_T=ratio_T < 1 - clip_low,
        high_T=ratio_T > 1 + clip_high,
    )


@loss(summary="−A·logp, for one update a batch", formula="l = −A·logp")
def reinforce(logp_T: Tensor, old_T: Tensor, advantage_T: Tensor) -> TokenLoss:
    """REINFORCE: l = −A·logp, the policy gradient for tokens sampled under the weights that learn.

    Nothing is bounded and nothing corrects for weights that have moved on since; the ratio is only reported.
    """
    never_T = torch.zeros_like(logp_T, dtype=torch.bool)
    return TokenLoss(
        loss_T=_likelihood(logp_T, advantage_T),
        ratio_T=bounded_exp(log_ratio(logp_T.detach(), old_T)),
        low_T=never_T,
        high_T=never_T,
    )


def _surrogate(ratio_T: Tensor, advantage_T: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """−min(ρ·A, clip(ρ, 1 − low, 1 + high)·A), with the gradient of ρ."""
    loss_T = torch.maximum(-ratio_T * advantage_T, -ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantage_T)
    still_T = ratio_T.detach()
    return TokenLoss(
        loss_T=loss_T,
        ratio_T=still_T,
        low_T=(advantage_T < 0) & (still_T < 1 - clip_low),
        high_T=(advantage_T > 0) & (still_T > 1 + clip_high),
    )


def _likelihood(logp_T: Tensor, factor_T: Tensor) -> Tensor:
    """−factor·logp; 0 where logp is −inf, since 0·inf would be NaN and the gradient there is undefined."""
    return -factor_T * torch.where(logp_T.isneginf(), 0.0, logp_T)
