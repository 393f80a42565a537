"""The condenser that is made of others, one after another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from condensegrpo.condensers.spans import account
from condensegrpo.messages import History, flatten
from condensegrpo.protocols import Budget, Condensed, RanksUnits, Stage


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Runs its stages in order, each on what the last one left and only while that is over the stage's own trigger.

    With the trigger of 1 that stages have by themselves it stops as soon as a prompt is within the budget.
    """

    stages: Sequence[Stage]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a pipeline needs at least one stage: {name: observation_mask}, {name: last_k}")

    @property
    def scorers(self) -> Sequence[str]:
        """Those of its stages."""
        return [
            name for stage in self.stages if isinstance(stage.condenser, RanksUnits) for name in stage.condenser.scorers
        ]

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, Any]]) -> Condensed:
        """What the last stage left. Costs one count for every stage and unit beside what the stages cost."""
        units, reasons = history.units, []
        for stage in self.stages:
            if budget.count(flatten(history.head, units)) <= stage.over * budget.tokens:
                continue
            found = await stage.condenser.condense(History(head=history.head, units=units), budget, tools)
            units = found.units
            reasons += [f"{stage.name}: {found.reason}"] if found.reason else []
        return Condensed(units=units, spans=account(history, units, budget.count), reason="; ".join(reasons))
