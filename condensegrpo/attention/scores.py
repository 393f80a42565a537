"""From attention to one score a unit. Pure functions.

Legend: P trunk tokens, n those that count (in a unit, and none of the first ``SINKS``).
"""

import math
from collections.abc import Sequence
from statistics import fmean

from condensegrpo.protocols import Attention

SINKS = 4  # first tokens of a prompt, which draw attention whatever they say
TOP = 0.2  # share of a unit's tokens whose mean is its score


def unit_scores(
    attention: Attention, units: Sequence[Sequence[int]], *, sinks: int = SINKS, top: float = TOP
) -> tuple[float, ...]:
    """How much more than by default each unit is looked at.

        s_j = n · a_j / Σ a  −  n · b_j / Σ b,     score of a unit = mean of the largest ⌈top · tokens⌉ of its s_j, or 0

    with a the attention of the question and the last output, b that of the blank, sums over the tokens that count. A
    token that gets an even share has n · a_j / Σ a = 1, whatever the number of tokens, so scores of prompts of
    different lengths compare. Subtracting the blank's is the calibration of in-context re-ranking
    (https://arxiv.org/abs/2410.02642, sec. 3.2); the template's tokens are in no unit and never count.

        a .1 .3 .1, b .1 .1 .1, one token a unit   ─▶   3·.2 − 1 = −.4 ─▶ 0;   3·.6 − 1 = .8;   0

    Args:
        attention: of a reading.
        units: the places in its trunk of each unit.

    Returns:
        One number a unit, not negative: 0 is a unit that is looked at no more than a blank would.
    """
    counting = [[place for place in places if place >= sinks] for places in units]
    everywhere = [place for places in counting for place in places]
    asked, blank = _shares(attention.question, everywhere), _shares(attention.blank, everywhere)
    return tuple(_top_mean([asked[place] - blank[place] for place in places], top) for places in counting)


def _shares(attention: Sequence[float], places: Sequence[int]) -> dict[int, float]:
    """The attention of each place, over that of an even share; all 0 where there is none to share."""
    total = math.fsum(attention[place] for place in places)
    return {place: len(places) * attention[place] / total if total else 0.0 for place in places}


def _top_mean(values: Sequence[float], top: float) -> float:
    """The mean of the largest, at least one of them; 0 of none, or if it is negative."""
    largest = sorted(values, reverse=True)[: max(math.ceil(top * len(values)), 1)]
    return max(fmean(largest), 0.0) if largest else 0.0
