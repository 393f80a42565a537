"""The account of a condenser that keeps or drops whole units."""

from collections.abc import Container

from condensegrpo.core.account import account
from condensegrpo.core.messages import History
from condensegrpo.core.protocols import Count
from condensegrpo.core.trajectory import Span

__all__ = ["account", "spans"]


def spans(history: History, kept: Container[int], count: Count) -> tuple[Span, ...]:
    """One span for every unit, in order; ``kept`` holds positions in ``history.units``."""
    return account(history, [unit for place, unit in enumerate(history.units) if place in kept], count)
