"""Fitting a budget by dropping the oldest units. A count renders whole messages, so counts are few and small."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from operator import is_not

from condensegrpo.core.messages import History, Unit, flatten
from condensegrpo.core.protocols.condenser import Budget, Condensed, added_tokens


def fits(history: History, units: Sequence[Unit], budget: Budget) -> bool:
    """Whether a prompt of the pinned messages and these units is within the budget.

    No count renders many more units than can fit: if the newest alone are over budget, so are all.
    """
    enough = most_by_their_sum(history, reversed(units), budget) + 1
    return (enough >= len(units) or within(history, units[-enough:], budget)) and within(history, units, budget)


def newest_that_fit(history: History, units: Sequence[Unit], budget: Budget) -> tuple[Unit, ...]:
    """The most of the newest units that fit the budget; the newest unit alone if even it does not fit.

    No count renders more than twice those units, however long the history is; see ``most_that_fit``.
    """
    likely = most_by_their_sum(history, reversed(units), budget)
    newest = most_that_fit(len(units), lambda most: within(history, units[-most:], budget), likely)
    return tuple(units[-newest:]) if newest else ()


def fewest_rewritten(
    history: History, shown: Callable[[int], tuple[Unit, ...]], numbers: range, budget: Budget, *, drop_oldest: bool
) -> tuple[Unit, ...]:
    """The units with as few of them rewritten as fit; with all rewritten and the oldest dropped if that is not enough.

    Args:
        shown: all units of the history, with so many of them rewritten.
        numbers: from the fewest that are rewritten whatever the budget to the most that may be.
        drop_oldest: False: nothing is dropped, so that the result may be over budget.
    """
    units, most = history.units, numbers[-1]
    everything = shown(most)
    kept = newest_that_fit(history, everything, budget) if drop_oldest else everything
    if len(kept) < len(units) or not (drop_oldest or len(units) < 2 or fits(history, everything, budget)):
        return kept
    tried = range(most)  # all is known to fit, or cannot be helped
    return shown(bisect_left(tried, True, lo=numbers[0], key=lambda number: within(history, shown(number), budget)))


def most_that_fit(total: int, fitting: Callable[[int], bool], likely: int = 1) -> int:
    """The largest number of units up to ``total`` that fits, taken for monotone; 1 if not even that fits, 0 of none.

    If ``likely`` is right that takes two questions, the last of them about the answer. Otherwise it doubles the number
    until it is over budget and then halves the gap: 2·log2(n) questions at most for n units.
    """
    if total < 2:
        return total
    if 1 < likely <= total and (likely == total or not fitting(likely + 1)) and fitting(likely):
        return likely
    low = 1  # so many units are known to fit, or it is the newest unit alone
    while low < total and fitting(min(2 * low, total)):
        low = min(2 * low, total)
    longer = range(low + 1, min(2 * low, total))
    return low + bisect_left(longer, True, key=lambda most: not fitting(most))


def most_by_their_sum(history: History, units: Iterable[Unit], budget: Budget) -> int:
    """How many of the first of these units fit if tokens of units add up: each is counted once in an episode."""
    room, number = budget.tokens - budget.count(history.pinned), 0
    for unit in units:
        tokens = history.sizes.get(unit)
        room -= added_tokens(history, unit, budget.count) if tokens is None else tokens
        if room < 0:
            break
        number += 1
    return number


def within(history: History, units: Sequence[Unit], budget: Budget) -> bool:
    """Whether a prompt of the pinned messages and these units is within the budget, by one count of all."""
    return budget.count(flatten(history.pinned, units)) <= budget.tokens


def reported(units: Sequence[Unit], shown: tuple[Unit, ...], rewritten: str) -> Condensed:
    """The rewritten units that are shown of some, with the reason: ``masked the results of 2 of 5 units``."""
    dropped = len(units) - len(shown)
    changed = sum(map(is_not, shown, units[dropped:]))
    parts = [f"{rewritten} of {changed} of {len(units)} units"] if changed else []
    parts += [f"dropped the {dropped} oldest"] if dropped else []
    return Condensed(units=shown, reason=", ".join(parts))
