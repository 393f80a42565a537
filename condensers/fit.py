"""Fitting a budget: tokens of units add up."""

from collections.abc import Callable, Iterable, Sequence
from operator import is_not

from condensegrpo.core.condenser import Condensed
from condensegrpo.core.messages import Unit


def total(units: Iterable[Unit]) -> int:
    """The tokens of some units."""
    return sum(unit.tokens for unit in units)


def newest_that_fit(units: Sequence[Unit], room: int) -> tuple[Unit, ...]:
    """The most of the newest units within ``room`` tokens; the newest unit alone if even it does not fit."""
    start, left = len(units), room
    while start and (left := left - units[start - 1].tokens) >= 0:
        start -= 1
    return tuple(units[min(start, max(len(units) - 1, 0)) :])


def most_rewritten(
    units: Sequence[Unit], rewrite: Callable[[int], Unit], spare: Iterable[int], room: int, *, drop_oldest: bool
) -> tuple[Unit, ...]:
    """Rewritten units, with as many of the spared ones unchanged as fit; without the oldest if that is not enough.

    Args:
        rewrite: the unit to show in the place of that of an index.
        spare: indices of the units that stay unchanged if there is room, those that matter most first.
        drop_oldest: False: nothing is dropped, so that the result may be over budget.
    """
    shown, left = list[Unit](), room
    for index in reversed(range(len(units))):  # the newest first: older ones than fit are not rewritten
        unit = rewrite(index)
        if drop_oldest and shown and unit.tokens > left:
            return tuple(reversed(shown))
        shown.append(unit)
        left -= unit.tokens
    shown.reverse()
    for index in spare:
        left -= units[index].tokens - shown[index].tokens
        if left < 0:
            break
        shown[index] = units[index]
    return tuple(shown)


def reported(units: Sequence[Unit], shown: tuple[Unit, ...], rewritten: str) -> Condensed:
    """The rewritten units that are shown of some, with the reason: ``masked the results of 2 of 5 units``."""
    dropped = len(units) - len(shown)
    changed = sum(map(is_not, shown, units[dropped:]))
    parts = [f"{rewritten} of {changed} of {len(units)} units"] if changed else []
    parts += [f"dropped the {dropped} oldest"] if dropped else []
    return Condensed(units=shown, reason=", ".join(parts))
