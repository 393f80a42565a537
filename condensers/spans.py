"""What became of every unit of a history, for condensers that keep or drop."""

from collections.abc import Container

from condensegrpo.messages import History, Unit
from condensegrpo.protocols import Count
from condensegrpo.trajectory import Fate, Span


def spans(history: History, kept: Container[int], count: Count) -> tuple[Span, ...]:
    """One span for every unit, in order; ``kept`` holds positions in ``history.units``.

    The tokens of a unit are those that it adds to the head alone, its share of the template included.
    """
    head = count(history.head)
    return tuple(
        Span(
            turn=unit.turn,
            fate=Fate.KEPT if position in kept else Fate.DROPPED,
            tokens=_tokens(history, unit, count, head),
        )
        for position, unit in enumerate(history.units)
    )


def _tokens(history: History, unit: Unit, count: Count, head: int) -> int:
    return max(count((*history.head, *unit.messages)) - head, 0)
