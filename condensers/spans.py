"""What became of every unit of a history: the account that each condenser owes."""

from collections.abc import Container, Sequence

from condensegrpo.messages import History, Unit
from condensegrpo.protocols import Count
from condensegrpo.trajectory import Fate, Span


def spans(history: History, kept: Container[int], count: Count) -> tuple[Span, ...]:
    """One span for every unit, in order, of a condenser that keeps or drops; ``kept`` holds positions in the units."""
    return account(history, [unit for place, unit in enumerate(history.units) if place in kept], count)


def account(history: History, shown: Sequence[Unit], count: Count) -> tuple[Span, ...]:
    """One span for every unit, in order, told from the units that are shown in place of the history's.

    A unit is kept if it is shown as it was, rewritten if another is shown in its place, and else dropped. Its tokens
    are those that it adds to the head alone, its share of the template included.
    """
    by_turn = {unit.turn: unit for unit in shown}
    head = count(history.head)
    return tuple(
        Span(turn=unit.turn, fate=_fate(unit, by_turn.get(unit.turn)), tokens=_tokens(history, unit, count, head))
        for unit in history.units
    )


def _fate(unit: Unit, shown: Unit | None) -> Fate:
    if shown is None:
        return Fate.DROPPED
    return Fate.KEPT if shown == unit else Fate.REWRITTEN


def _tokens(history: History, unit: Unit, count: Count, head: int) -> int:
    return max(count((*history.head, *unit.messages)) - head, 0)
