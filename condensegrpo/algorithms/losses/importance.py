"""Importance correction between the sampler, which drew the tokens, and the learner. Pure functions; torch only.

Legend of the suffixes: ``_T`` trained tokens.

Two engines give one token different probabilities even under equal weights: other kernels, another precision. The
policy gradient of a token that was drawn from the sampler's distribution is right when multiplied by learner/sampler,
and that factor is bounded because a rare token can make it arbitrarily large: truncated importance sampling (TIS) cuts
it off, masking (as IcePop does, https://arxiv.org/abs/2510.18855) leaves the token out. Nothing here has a gradient.

A correction of ``clipped`` by it presupposes that ``clipped`` is given the learner's own log-probabilities as ``old``;
given the sampler's, its ratio already includes the difference.
"""

import math
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from condensegrpo.algorithms.losses.columns import bounded_exp, check_columns, check_turns, log_ratio, turn_sum
from condensegrpo.algorithms.settings import Level, Mode

LEVELS, MODES = get_args(Level), get_args(Mode)


class ImportanceWeights(NamedTuple):
    """The correction of every trained token, with what to log about it; nothing carries a gradient."""

    weight_T: Tensor  # float >= 0, what the token's loss is multiplied by
    ratio_T: Tensor  # float > 0, learner / sampler before it was bounded
    bounded_T: Tensor  # bool, the bound changed it


def importance(
    learner_T: Tensor,
    sampler_T: Tensor,
    turn_T: Tensor,
    *,
    cap: float,
    level: Level,
    mode: Mode,
) -> ImportanceWeights:
    """What each token's loss is multiplied by, so that tokens of the sampler count as if the learner had drawn them.

                  token                                turn
        ratio     exp(clip(learner − sampler, ±20))    exp(clip(Σ_turn (learner − sampler), ±20))

                  truncate                             mask
        weight    min(ratio, cap)                      ratio where 1/cap <= ratio <= cap, else 0

    A token ratio has little variance and is biased, since it leaves out what went before in the turn; a turn ratio is
    unbiased before its bound, and most of it lies beyond any bound once turns are long.

    Example: learner − sampler = [ln 3, ln ½] in one turn, cap 2. By token: ratios [3, ½], truncated [2, ½] and masked
    [0, ½]. By turn: both 3/2, which neither bound changes.

    Args:
        learner_T: float, nats, log-probability of the token under the weights that sampled it, in the learner's engine.
        sampler_T: float, nats, as the sampler reported it, under the distribution it drew from.
        turn_T: int, the token's turn: any labels; all tokens of a turn must be here.
        cap: finite, at least 1; 1 truncates to at most 1, and masks all but equal probabilities.
        level: one of ``LEVELS``.
        mode: one of ``MODES``.

    Raises:
        ValueError: the columns differ in shape, turns are not integers, or cap, level or mode are none of the above.
    """
    doing = "computing the importance correction"
    check_columns(doing, learner_T=learner_T, sampler_T=sampler_T, turn_T=turn_T)
    check_turns(doing, turn_T)
    if not 1 <= cap < math.inf:
        raise ValueError(
            f"{doing}: cap is {cap}, wanted a finite number >= 1, or none (0 in a configuration) for no correction."
        )
    if level not in LEVELS or mode not in MODES:
        raise ValueError(
            f"{doing}: found level {level!r} and mode {mode!r}, wanted one of {sorted(LEVELS)} and one of "
            f"{sorted(MODES)}."
        )
    log_ratio_T = log_ratio(learner_T.detach(), sampler_T)  # 0 where both give the token probability 0
    ratio_T = bounded_exp(turn_sum(log_ratio_T, turn_T) if level == "turn" else log_ratio_T)
    if mode == "truncate":  # no token is lost, and the bias is that of the tokens above the cap
        weight_T = ratio_T.clamp(max=cap)
    else:  # what the two engines disagree on trains nothing
        weight_T = torch.where((ratio_T >= 1 / cap) & (ratio_T <= cap), ratio_T, 0.0)
    return ImportanceWeights(weight_T=weight_T, ratio_T=ratio_T, bounded_T=weight_T != ratio_T)
