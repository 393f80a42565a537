"""The control that cuts the oldest units off and leaves no trace of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from condensegrpo.condensers.fit import newest_that_fit
from condensegrpo.condensers.spans import account
from condensegrpo.core.messages import History
from condensegrpo.core.protocols import Budget, Condensed


@dataclass(frozen=True, slots=True)
class Truncate:
    """Drops the oldest units until the rest fits: what an agent without a condenser has to do.

    Nothing stands in for what is dropped. The newest unit is never dropped: if it does not fit alone it is returned
    alone, and the engine stops. ``last_k`` does the same to the units that it was told to keep.
    """

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """As many of the newest units as fit. Costs one count for every unit and 2·log2 of the units more."""
        kept = newest_that_fit(history.pinned, history.units, budget)
        dropped = len(history.units) - len(kept)
        return Condensed(
            units=kept,
            spans=account(history, kept, budget.count),
            reason=f"cut off the {dropped} oldest of {len(history.units)} units" if dropped else "",
        )
