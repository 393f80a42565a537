"""Fitting a budget by dropping the oldest units. A count renders whole messages, so there are few and small ones."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from condensegrpo.messages import Message, Unit, flatten
from condensegrpo.protocols import Budget


def fits(head: Sequence[Message], units: Sequence[Unit], budget: Budget) -> bool:
    """Whether a prompt of the head and these units is within the budget."""
    return budget.count(flatten(head, units)) <= budget.tokens


def newest_that_fit(head: Sequence[Message], units: Sequence[Unit], budget: Budget) -> tuple[Unit, ...]:
    """The longest end of the units that is within the budget; the newest unit alone if even that is not.

    None of the counts renders more than twice that end, however long the history before it; see ``most_that_fit``.
    """
    newest = most_that_fit(len(units), lambda most: fits(head, units[-most:], budget))
    return tuple(units[-newest:]) if newest else ()


def most_that_fit(total: int, fitting: Callable[[int], bool]) -> int:
    """The largest number of units up to ``total`` that fits, taken for monotone; 1 if not even that fits, 0 of none.

    It doubles the number until it is over budget and then halves the gap: 2·log2(n) questions at most for n units.
    """
    if total < 2:
        return total
    low = 1  # of this many units it is known that they fit, or else they are the newest alone
    while low < total and fitting(min(2 * low, total)):
        low = min(2 * low, total)
    longer = range(low + 1, min(2 * low, total))
    return low + bisect_left(longer, True, key=lambda most: not fitting(most))
