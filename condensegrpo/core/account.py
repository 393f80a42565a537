"""Spans: what a condensation did with every unit of a history. Standard library only."""

from collections.abc import Sequence

from condensegrpo.core.messages import History, Unit
from condensegrpo.core.protocols import Count
from condensegrpo.core.trajectory import Span, SpanStatus


def account(history: History, shown: Sequence[Unit], count: Count) -> tuple[Span, ...]:
    """One span for every unit, in order, from the units that are shown in place of the history's.

    A unit is kept if it is shown unchanged, rewritten if another unit is shown in its place, and otherwise dropped. If
    the history's summary is shown, all units that it covers are rewritten. A unit's tokens are those that it adds to
    the pinned messages alone, its share of the template included.

        units 0 1 2 3, shown 0 and 3 with its result masked     kept dropped dropped rewritten
        units 0 1 2 3, shown the summary of 0 1 2 and 3         rewritten rewritten rewritten kept
    """
    by_turn = {unit.turn: unit for unit in shown}
    summary = history.summary
    summarised = summary.through if summary is not None and by_turn.get(summary.through) == summary.unit else -1
    pinned = count(history.pinned)
    return tuple(
        Span(
            turn=unit.turn,
            status=SpanStatus.REWRITTEN if unit.turn <= summarised else _status(unit, by_turn.get(unit.turn)),
            tokens=max(count((*history.pinned, *unit.messages)) - pinned, 0),
        )
        for unit in history.units
    )


def _status(unit: Unit, shown: Unit | None) -> SpanStatus:
    if shown is None:
        return SpanStatus.DROPPED
    return SpanStatus.KEPT if shown == unit else SpanStatus.REWRITTEN
