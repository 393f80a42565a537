"""The condenser that runs other condensers in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from condensegrpo.condensers.fit import fits
from condensegrpo.core.messages import Caption, History, Message, Summary
from condensegrpo.core.protocols.condenser import (
    Budget,
    ChecksRoom,
    Condensed,
    Counted,
    RanksUnits,
    Stage,
    WritesSummaries,
)
from condensegrpo.core.protocols.tool import EnvironmentTool, OffersTools


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Runs its stages in order, each on the result of the last and only if that exceeds the stage's own trigger.

    With the default trigger of 1 it stops as soon as the prompt is within the budget.
    """

    stages: Sequence[Stage]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a pipeline needs at least one stage: {name: observation_mask}, {name: last_k}")
        writing = [stage.name for stage in self.stages if _writes(stage)]
        if len(writing) > 1:
            raise ValueError(
                f"at most one stage of a pipeline may request text from the policy, found {', '.join(writing)}"
            )
        late = [stage.name for stage in self.stages if stage.over and _tools(stage)]
        if late:
            raise ValueError(
                f"the policy decides when {', '.join(late)} condenses, whatever the length of the prompt: set over: 0"
            )

    def tools(self) -> Sequence[EnvironmentTool]:
        """The tools that its stages offer the policy."""
        return [tool for stage in self.stages for tool in _tools(stage)]

    @property
    def writes(self) -> int:
        """Texts that its stages may request from the policy in one call."""
        return sum(map(_writes, self.stages))

    def check_room(self, pinned: Sequence[Message], budget: Budget) -> None:
        """Refuse a budget that one of its stages refuses."""
        for stage in self.stages:
            if isinstance(stage.condenser, ChecksRoom):
                stage.condenser.check_room(pinned, budget)

    def counts(self) -> Mapping[str, float]:
        """The counts of its stages, prefixed by their names."""
        counting = [(stage.name, stage.condenser) for stage in self.stages if isinstance(stage.condenser, Counted)]
        return {f"{name}_{key}": value for name, condenser in counting for key, value in condenser.counts().items()}

    @property
    def scorers(self) -> Sequence[str]:
        """The scorers of its stages."""
        return [
            name for stage in self.stages if isinstance(stage.condenser, RanksUnits) for name in stage.condenser.scorers
        ]

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The result of the last stage. The first starts from the units behind the last summary.

        Costs a count per stage beside the costs of the stages.
        """
        units = history.current_units
        summary: Summary | None = None
        written = False  # by the policy
        reasons: list[str] = []
        rejected: list[str] = []
        captions: list[Caption] = []
        for stage in self.stages:
            if fits(history, units, replace(budget, tokens=int(stage.over * budget.tokens))):
                continue
            condensed = await stage.condenser.condense(history.with_units(units), budget, tools)
            units = condensed.units
            if condensed.summary is not None:
                summary, written = condensed.summary, _writes(stage) > 0
            rejected += condensed.rejected
            captions += condensed.captions
            reasons += [f"{stage.name}: {condensed.reason}"] if condensed.reason else []
        if summary is not None and summary.unit not in units:
            rejected += ["a later stage left it out"] if written else []
            summary = None
        return Condensed(
            units=units,
            reason="; ".join(reasons),
            summary=summary,
            captions=tuple(captions),
            rejected=tuple(rejected),
        )


def _tools(stage: Stage) -> Sequence[EnvironmentTool]:
    return stage.condenser.tools() if isinstance(stage.condenser, OffersTools) else ()


def _writes(stage: Stage) -> int:
    return stage.condenser.writes if isinstance(stage.condenser, WritesSummaries) else 0
