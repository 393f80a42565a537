"""Turns attention into one score per unit. Pure functions.

Legend: P prompt tokens.
"""

import math
from collections.abc import Sequence
from statistics import fmean

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.messages import History
from condensegrpo.core.protocols.attention import TokenAttention

SINKS = 4  # first tokens of a prompt, which draw attention whatever their content
TOP = 0.2  # share of a unit's tokens whose mean is its score


def unit_scores(
    attention: TokenAttention, units: Sequence[Sequence[int]], *, sinks: int = SINKS, top: float = TOP
) -> tuple[float, ...]:
    """How much more attention than the calibration's each unit gets.

        s_j = P · (a_j − b_j),      score of a unit = mean of the largest ⌈top · tokens⌉ of its s_j, or 0 if negative

    with a the attention of the question and the last output, b that of the calibration. P makes prompts of different
    lengths comparable: a token with an even share of all attention has P · a_j = 1. Subtracting b is the calibration of
    in-context re-ranking (https://arxiv.org/abs/2410.02642, sec. 3.2). The template's tokens are in no unit and, like
    the sinks, are never scored. Their attention is not redistributed to the units: a question without an answer on a
    page attends to the sinks, which means that the page's units are not needed.

        a .1 .3 .1, b .1 .1 .1, one token per unit, P = 3   ─▶   0;   3 · (.3 − .1) = .6;   0

    Args:
        attention: of an attention query.
        units: the indices in its prompt of each unit.

    Returns:
        One number per unit, not negative: 0 means no more attention than in the calibration.
    """
    size = len(attention.question)
    pairs = zip(attention.question, attention.calibration, strict=True)
    excess = [size * (question - calibration) for question, calibration in pairs]
    return tuple(_top_mean([excess[index] for index in indices if index >= sinks], top) for indices in units)


def _top_mean(values: Sequence[float], top: float) -> float:
    """The mean of the largest, at least one of them; 0 of none, or if it is negative."""
    largest = sorted(values, reverse=True)[: max(math.ceil(top * len(values)), 1)]
    return max(fmean(largest), 0.0) if largest else 0.0


def check_text(history: History) -> None:
    """Check that a history shows no pictures: their placeholders alone would be scored.

    Raises:
        SamplerError: it does.
    """
    if any(message.media for message in history.messages):
        raise SamplerError(
            "scoring the units of a history: it shows pictures, which scorers do not see. Use a condenser that needs "
            "no scorer."
        )
