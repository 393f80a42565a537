"""Fitting a budget by dropping the oldest units. A count renders whole messages, so counts are few and small."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from condensegrpo.core.messages import Message, Unit, flatten
from condensegrpo.core.protocols import Budget


def fits(pinned: Sequence[Message], units: Sequence[Unit], budget: Budget) -> bool:
    """Whether a prompt of the pinned messages and these units is within the budget."""
    return budget.count(flatten(pinned, units)) <= budget.tokens


def newest_that_fit(pinned: Sequence[Message], units: Sequence[Unit], budget: Budget) -> tuple[Unit, ...]:
    """The most of the newest units that fit the budget; the newest unit alone if even it does not fit.

    No count renders more than twice those units, however long the history is; see ``most_that_fit``.
    """
    likely = _most_by_their_sum(pinned, units, budget)
    newest = most_that_fit(len(units), lambda most: fits(pinned, units[-most:], budget), likely)
    return tuple(units[-newest:]) if newest else ()


def most_that_fit(total: int, fitting: Callable[[int], bool], likely: int = 1) -> int:
    """The largest number of units up to ``total`` that fits, taken for monotone; 1 if not even that fits, 0 of none.

    If ``likely`` is right that takes two questions. Otherwise it doubles the number until it is over budget and then
    halves the gap: 2·log2(n) questions at most for n units.
    """
    if total < 2:
        return total
    if 1 < likely <= total and fitting(likely) and (likely == total or not fitting(likely + 1)):
        return likely
    low = 1  # so many units are known to fit, or it is the newest unit alone
    while low < total and fitting(min(2 * low, total)):
        low = min(2 * low, total)
    longer = range(low + 1, min(2 * low, total))
    return low + bisect_left(longer, True, key=lambda most: not fitting(most))


def _most_by_their_sum(pinned: Sequence[Message], units: Sequence[Unit], budget: Budget) -> int:
    """How many of the newest fit if tokens of units add up: each is counted once, and remembered by the renderer."""
    empty = budget.count(tuple(pinned))
    left = budget.tokens - empty
    for number, unit in enumerate(reversed(units)):
        left -= budget.count((*pinned, *unit.messages)) - empty
        if left < 0:
            return number
    return len(units)
