"""What every episode of a rollout shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from condensegrpo.core.protocols.condenser import Condenser, UnitScorer
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.protocols.task import Expert
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.episodes.information import AnswerProbe
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import Confidence, Limits, Trigger
from condensegrpo.episodes.stopwatch import Stopwatch
from condensegrpo.episodes.toolcalls import Toolbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The parts that play an episode. Condensers know how to condense; ``trigger`` says when they are called."""

    sampler: Sampler
    writer: Sampler | None = None  # of the texts that a condenser asks for, the initial policy; None: ``sampler``
    expert: Expert | None = None  # of one episode, which then replies in place of the sampler
    renderer: Renderer
    condenser: Condenser
    condenser_name: str  # as declared in every Condensation
    scorers: Mapping[str, UnitScorer] = field(default_factory=dict)  # that the condenser may call, by name
    trigger: Trigger = field(default_factory=Trigger)
    toolbox: Toolbox
    limits: Limits
    temperature: float = 1.0  # 0 is greedy
    probe: AnswerProbe | None = None  # None: what contexts know of the answer is not measured
    confidence: Confidence | None = None  # None: no answer is drafted
    stopwatch: Stopwatch = field(default_factory=Stopwatch)  # of the condenser

    def at_step(self, step: int) -> Self:
        """The engine with the context budget of a training step; ``step`` below 0: of an evaluation."""
        budget = self.trigger.budget(self.limits.max_context_tokens, step)
        return replace(self, limits=replace(self.limits, max_context_tokens=budget))

    def offering(self, tools: Sequence[EnvironmentTool]) -> Self:
        """The engine of an episode whose environment offers tools: they are in its prompts and its toolbox.

        Raises:
            ValueError: two tools have one name.
        """
        if not tools:
            return self
        toolbox = self.toolbox.with_tools(tools)
        return replace(self, toolbox=toolbox, renderer=self.renderer.with_tools(toolbox.template_schemas))
