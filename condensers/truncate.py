"""The control that cuts the oldest units off and leaves no trace of them."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from condensegrpo.condensers.spans import spans
from condensegrpo.messages import History, flatten
from condensegrpo.protocols import Budget, Condensed


@dataclass(frozen=True, slots=True)
class Truncate:
    """Drops the oldest units until the rest fits; what an agent without a condenser has to do.

    Nothing stands in for what is dropped. The newest unit is never dropped: if it does not fit alone it is returned
    alone, and the engine stops. ``last_k`` does the same to the units that it was told to keep.
    """

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, Any]]) -> Condensed:
        """As many of the newest units as fit. Costs one count for every unit and log2 of the units more."""
        total = len(history.units)

        def fits(dropped: int) -> bool:
            return budget.count(flatten(history.head, history.units[dropped:])) <= budget.tokens

        dropped = bisect_left(range(max(total - 1, 0)), True, key=fits)
        return Condensed(
            units=history.units[dropped:],
            spans=spans(history, range(dropped, total), budget.count),
            reason=f"cut off the {dropped} oldest of {total} units" if dropped else "",
        )
