"""The condenser that replaces old pictures by a line: what most agents that see screenshots do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from condensegrpo.condensers.old_pictures import OldPictures, without_pictures
from condensegrpo.core.messages import History
from condensegrpo.core.protocols.condenser import Budget, Condensed


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMask(OldPictures):
    """Replaces old pictures by ``[picture of turn 3 omitted: 1,240 tokens]``; replies and all texts stay.

    Pictures of the newest ``keep`` units that show any stay, and those of the oldest ``keep_first``. If that is over
    budget, these go too, the oldest first and never the newest unit's, and then the oldest units.
    """

    drop_oldest: bool = True  # False: only omit pictures, for a pipeline whose later stage fits the budget

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The units with lines for old pictures. Costs four counts for a new picture."""
        return self.rewritten(
            history,
            lambda units: without_pictures(history, units, budget.count),
            budget,
            "omitted the pictures",
            drop_oldest=self.drop_oldest,
        )
