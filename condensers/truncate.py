"""The control that drops the oldest units without a trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from condensegrpo.condensers.fit import newest_that_fit
from condensegrpo.core.messages import History
from condensegrpo.core.protocols.condenser import Budget, Condensed


@dataclass(frozen=True, slots=True)
class Truncate:
    """Drops the oldest units until the rest fits, as an agent without a condenser does.

    Dropped units leave no placeholder. The newest unit is never dropped: if it does not fit by itself, it is returned
    and the engine stops. ``last_k`` treats the units that it keeps in the same way.
    """

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """As many of the newest units as fit. Costs one count for a new unit and a few of the kept ones."""
        kept = newest_that_fit(history, history.units, budget)
        dropped = len(history.units) - len(kept)
        return Condensed(
            units=kept,
            reason=f"cut off the {dropped} oldest of {len(history.units)} units" if dropped else "",
        )
