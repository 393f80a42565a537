"""The condenser that replaces old pictures by a line: what most agents that see screenshots do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from condensegrpo.condensers.old_pictures import reported, rewrite_old_pictures, without_pictures
from condensegrpo.core.messages import History
from condensegrpo.core.protocols.condenser import Budget, Condensed


@dataclass(frozen=True, slots=True)
class ImageMask:
    """Replaces old pictures by ``[picture of turn 3 omitted: 1,240 tokens]``; replies and all texts stay.

    Pictures of the newest ``keep`` units that show any stay, and those of the oldest ``keep_first``. If that is over
    budget, these go too, the oldest first and never the newest unit's, and then the oldest units.
    """

    keep: Annotated[int, Ge(0)] = 1
    keep_first: Annotated[int, Ge(0)] = 0
    drop_oldest: bool = True  # False: only omit pictures, for a pipeline whose later stage fits the budget

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The units with lines for old pictures. Costs four counts for a new picture."""
        units = rewrite_old_pictures(
            history,
            lambda units: without_pictures(history, units, budget.count),
            budget,
            keep=self.keep,
            keep_first=self.keep_first,
            drop_oldest=self.drop_oldest,
        )
        return reported(history.units, units, "omitted")
