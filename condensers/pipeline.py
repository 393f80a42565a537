"""The condenser that runs other condensers in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from condensegrpo.condensers.fit import total
from condensegrpo.core.condenser import Budget, Condensed, Condenser, Count, Stage
from condensegrpo.core.messages import Caption, History, Message, Unit
from condensegrpo.core.protocols.tool import EnvironmentTool


@dataclass(frozen=True)
class Pipeline(Condenser):
    """Runs its stages in order, each on the result of the last and only if that exceeds the stage's own trigger.

    With the default trigger of 1 it stops as soon as the prompt is within the budget.
    """

    stages: Sequence[Stage]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a pipeline needs at least one stage: {name: observation_mask}, {name: last_k}")
        writing = [stage.name for stage in self.stages if stage.condenser.writes]
        if len(writing) > 1:
            raise ValueError(
                f"at most one stage of a pipeline may request text from the policy, found {', '.join(writing)}"
            )
        late = [stage.name for stage in self.stages if stage.over and stage.condenser.tools()]
        if late:
            raise ValueError(
                f"the policy decides when {', '.join(late)} condenses, whatever the length of the prompt: set over: 0"
            )

    @property
    def writes(self) -> int:
        """Texts that its stages may request from the policy in one call."""
        return sum(stage.condenser.writes for stage in self.stages)

    @property
    def scorers(self) -> Sequence[str]:
        """The scorers of its stages."""
        return [name for stage in self.stages for name in stage.condenser.scorers]

    def tools(self) -> Sequence[EnvironmentTool]:
        """The tools that its stages offer the policy."""
        return [tool for stage in self.stages for tool in stage.condenser.tools()]

    def check(self, pinned: Sequence[Message], budget: Budget, count: Count) -> None:
        """Refuse a budget that one of its stages refuses."""
        for stage in self.stages:
            stage.condenser.check(pinned, budget, count)

    def counts(self) -> Mapping[str, float]:
        """The counts of its stages, prefixed by their names."""
        return {
            f"{stage.name}_{key}": value for stage in self.stages for key, value in stage.condenser.counts().items()
        }

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The result of the last stage. The first starts from the units after the last note."""
        units = history.current_units
        note: Unit | None = None
        written = False  # by the policy
        reasons, rejected, captions = list[str](), list[str](), list[Caption]()
        for stage in self.stages:
            if total(units) <= int(stage.over * budget.tokens):
                continue
            condensed = await stage.condenser.condense(history.with_units(units), budget)
            units = tuple(condensed.units)
            if condensed.note is not None:
                note, written = condensed.note, stage.condenser.writes > 0
            rejected += condensed.rejected
            captions += condensed.captions
            reasons += [f"{stage.name}: {condensed.reason}"] if condensed.reason else []
        if note is not None and note not in units:
            rejected += ["a later stage left it out"] if written else []
            note = None
        return Condensed(
            units=units, reason="; ".join(reasons), note=note, captions=tuple(captions), rejected=tuple(rejected)
        )
