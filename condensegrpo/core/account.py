"""Accounting: the tokens of units, and what a condensation did with every unit. Standard library only."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter, eq, itemgetter

from condensegrpo.core.messages import History, Unit
from condensegrpo.core.protocols.condenser import Count
from condensegrpo.core.trajectory import Span, SpanStatus

_turn = attrgetter("turn")


def unit_tokens(history: History, count: Count) -> tuple[int, ...]:
    """The tokens of every unit, see ``added_tokens``; those in ``History.tokens`` are not counted again."""
    known = history.tokens
    return (*known, *(added_tokens(history, unit, count) for unit in history.units[len(known) :]))


def added_tokens(history: History, unit: Unit, count: Count) -> int:
    """The tokens that a unit adds to the pinned messages alone, its share of the template included."""
    tokens = history.sizes.get(unit)
    if tokens is None:
        tokens = max(count((*history.pinned, *unit.messages)) - count(history.pinned), 0)
        history.sizes[unit] = tokens
    return tokens


def account(history: History, shown: Sequence[Unit], count: Count) -> tuple[Span, ...]:
    """What became of every unit of a history, from the units that are shown in place of them.

    A unit is kept if it is shown unchanged, rewritten if another unit is shown in its place, and otherwise dropped. If
    the history's summary is shown, all units that it covers are rewritten.

        units 0 1 2 3, shown 0 and 3 with its result masked     kept 0, dropped 1-2, rewritten 3
        units 0 1 2 3, shown the summary of 0 1 2 and 3         rewritten 0-2, kept 3

    Args:
        shown: of the history, rewritten or not, in order; before them its summary, if any.
    """
    units, tokens, start, spans = history.units, unit_tokens(history, count), 0, list[Span]()
    for status, run in groupby(_runs(history, tuple(shown)), key=itemgetter(0)):
        *_, (_, end) = run
        first, last, total = units[start].turn, units[end - 1].turn, sum(tokens[start:end])
        spans.append(Span(first=first, last=last, units=end - start, status=status, tokens=total))
        start = end
    return tuple(spans)


def _runs(history: History, shown: tuple[Unit, ...]) -> Iterator[tuple[SpanStatus, int]]:
    """Statuses in order, each with the index after its last unit."""
    units, done = history.units, 0
    if history.summary is not None and shown[:1] == (history.summary.unit,):
        shown, done = shown[1:], bisect_left(units, history.summary.through + 1, key=_turn)
        yield SpanStatus.REWRITTEN, done
    for unit, index in zip(shown, positions(units, shown, done), strict=True):
        if index > done:
            yield SpanStatus.DROPPED, index
        done = index + 1
        yield SpanStatus.KEPT if unit is units[index] or unit == units[index] else SpanStatus.REWRITTEN, done
    if done < len(units):
        yield SpanStatus.DROPPED, len(units)


def positions(units: Sequence[Unit], shown: Sequence[Unit], first: int = 0) -> Sequence[int]:
    """The index of each shown unit among the units of a history from ``first`` on, found by its turn.

    Raises:
        ValueError: it shows a unit that the history does not have, or not in order, or twice.
    """
    newest = range(len(units) - len(shown), len(units))
    if newest.start >= first and all(map(eq, map(_turn, shown), map(_turn, units[newest.start :]))):
        return newest
    turns, result, end = list(map(_turn, units)), list[int](), first
    for turn in map(_turn, shown):
        end = bisect_left(turns, turn, lo=end)
        if turns[end : end + 1] != [turn]:
            raise ValueError(
                f"it shows the units of turns {[unit.turn for unit in shown]}, wanted units of the history, each at "
                f"most once and in order: {turns}"
            )
        result.append(end)
        end += 1
    return result
