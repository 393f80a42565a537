"""The condenser that keeps everything: the baseline, whose trajectories merge into one segment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from condensegrpo.core.messages import History
from condensegrpo.core.protocols.condenser import Budget, Condensed


@dataclass(frozen=True, slots=True)
class Full:
    """Keeps everything. A history over budget is returned unchanged, and the engine stops with ``context_overflow``."""

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """All units, unchanged."""
        return Condensed(units=history.units)
