"""The account of a condenser that keeps or drops whole units."""

from collections.abc import Container

from condensegrpo.account import account
from condensegrpo.messages import History
from condensegrpo.protocols import Count
from condensegrpo.trajectory import Span

__all__ = ["account", "spans"]


def spans(history: History, kept: Container[int], count: Count) -> tuple[Span, ...]:
    """One span for every unit, in order; ``kept`` holds positions in ``history.units``."""
    return account(history, [unit for place, unit in enumerate(history.units) if place in kept], count)
