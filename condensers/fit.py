"""Fitting a budget by dropping the oldest units. A count renders whole messages, so there are few and small ones."""

from bisect import bisect_left
from collections.abc import Sequence

from condensegrpo.messages import Message, Unit, flatten
from condensegrpo.protocols import Budget


def fits(head: Sequence[Message], units: Sequence[Unit], budget: Budget) -> bool:
    """Whether a prompt of the head and these units is within the budget."""
    return budget.count(flatten(head, units)) <= budget.tokens


def newest_that_fit(head: Sequence[Message], units: Sequence[Unit], budget: Budget) -> tuple[Unit, ...]:
    """The longest end of the units that is within the budget; the newest unit alone if even that is not.

    It doubles the end until it is over budget and then halves the gap: 2·log2(n) counts at most for an end of n units,
    none of which renders more than twice that end, however long the history before it.
    """
    if len(units) < 2:
        return tuple(units)
    low = 1  # of this many units it is known that they fit, or else they are the newest alone
    while low < len(units) and fits(head, units[-min(2 * low, len(units)) :], budget):
        low = min(2 * low, len(units))
    longer = range(low + 1, min(2 * low, len(units)))
    low += bisect_left(longer, True, key=lambda newest: not fits(head, units[-newest:], budget))
    return tuple(units[-low:])
