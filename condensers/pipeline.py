"""The condenser that is made of others, one after another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from condensegrpo.core.account import account
from condensegrpo.core.messages import History, Message, Summary, flatten
from condensegrpo.core.protocols import Budget, ChecksRoom, Condensed, Counted, RanksUnits, Stage, Writes


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Runs its stages in order, each on what the last one left and only while that is over the stage's own trigger.

    With the trigger of 1 that stages have by themselves it stops as soon as a prompt is within the budget.
    """

    stages: Sequence[Stage]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a pipeline needs at least one stage: {name: observation_mask}, {name: last_k}")
        writing = [stage.name for stage in self.stages if _writes(stage)]
        if len(writing) > 1:
            raise ValueError(f"one stage of a pipeline may ask the policy for text, found {', '.join(writing)}")

    @property
    def writes(self) -> int:
        """Texts that the stage that asks the policy for some may ask for."""
        return sum(map(_writes, self.stages))

    def check_room(self, pinned: Sequence[Message], budget: Budget) -> None:
        """Refuse a budget that one of its stages refuses."""
        for stage in self.stages:
            if isinstance(stage.condenser, ChecksRoom):
                stage.condenser.check_room(pinned, budget)

    def counts(self) -> Mapping[str, float]:
        """What its stages counted, under their names."""
        counting = [(stage.name, stage.condenser) for stage in self.stages if isinstance(stage.condenser, Counted)]
        return {f"{name}_{key}": value for name, one in counting for key, value in one.counts().items()}

    @property
    def scorers(self) -> Sequence[str]:
        """Those of its stages."""
        return [
            name for stage in self.stages if isinstance(stage.condenser, RanksUnits) for name in stage.condenser.scorers
        ]

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """What the last stage left, beginning with what the last summary left, if one of them summarises.

        Costs one count for every stage and unit beside what the stages cost.
        """
        units = history.current_units
        summary: Summary | None = None
        written = False  # by the policy
        reasons: list[str] = []
        rejected: list[str] = []
        for stage in self.stages:
            if budget.count(flatten(history.pinned, units)) <= stage.over * budget.tokens:
                continue
            found = await stage.condenser.condense(History(pinned=history.pinned, units=units), budget, tools)
            units = found.units
            if found.summary is not None:
                summary, written = found.summary, _writes(stage) > 0
            rejected += found.rejected
            reasons += [f"{stage.name}: {found.reason}"] if found.reason else []
        if summary is not None and summary.unit not in units:
            rejected += ["a later stage left it out"] if written else []
            summary = None
        stands = history if summary is None else history.with_summary(summary)
        return Condensed(
            units=units,
            spans=account(stands, units, budget.count),
            reason="; ".join(reasons),
            summary=summary,
            rejected=tuple(rejected),
        )


def _writes(stage: Stage) -> int:
    return stage.condenser.writes if isinstance(stage.condenser, Writes) else 0
