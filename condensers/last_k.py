"""The condenser that keeps the newest units, and optionally the first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from condensegrpo.condensers.fit import newest_that_fit
from condensegrpo.core.messages import History
from condensegrpo.core.protocols.condenser import Budget, Condensed


@dataclass(frozen=True, slots=True)
class LastK:
    """Keeps the first ``keep_first`` and last ``keep_last`` units, then drops the oldest of those until the rest fits.

    The newest kept unit is never dropped: if it does not fit by itself, it is returned and the engine stops. Kept units
    are verbatim. Dropped units leave no placeholder, which would be a reply that the policy never gave.
    """

    keep_last: Annotated[int, Ge(0)] = 1  # 0 keeps none
    keep_first: Annotated[int, Ge(0)] = 0

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The kept units. Costs one count for a new unit and a few of the kept ones."""
        total = len(history.units)
        first = min(self.keep_first, total)
        chosen = (*history.units[:first], *history.units[max(total - self.keep_last, first) :])
        kept = newest_that_fit(history, chosen, budget)
        dropped = len(chosen) - len(kept)
        fitted = f", without the {dropped} oldest of them to fit {budget.tokens} tokens" if dropped else ""
        return Condensed(
            units=kept,
            reason="" if len(kept) == total else f"kept {len(chosen)} of {total} units{fitted}",
        )
