"""The parts that every episode of a rollout shares."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from condensegrpo.core.condenser import Condenser, UnitScorer
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.protocols.task import Expert, Problem
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import PLACE, CondenseSettings, ConfidenceSettings, Limits
from condensegrpo.episodes.toolcalls import Toolbox


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerProbe:
    """Measures how much information a context holds about the answer: log π(ground truth | c_t).

    The ground truth is measured as the policy would write it: with the form ``<answer>{answer}</answer>``

        I_t = log π(answer </answer> | c_t, <answer>)      nats, at temperature 1

    so that neither the decision to answer now nor the opening tag counts. The sampler measures it with the weights that
    the turn is sampled from. The policy does not see it, and it is not trained on.
    """

    sampler: Sampler
    renderer: Renderer
    form: str  # of an answer, with ``PLACE`` in it once

    async def measure(self, problem: Problem, prompt_ids: Sequence[int], media: Sequence[str] = ()) -> float | None:
        """I_t of a prompt, in nats, at most 0; None for a problem without ground truth."""
        if media:
            raise SamplerError(
                "measuring what a context knows of the answer: it shows pictures, which are not measured. Set "
                "rollout.answer_form=null."
            )
        if problem.answer is None:
            return None
        before, _, after = self.form.partition(PLACE)
        opening = self.renderer.text_ids(before)
        written = self.renderer.text_ids(problem.answer + after)
        return math.fsum(await self.sampler.score((*prompt_ids, *opening), written))


class Stopwatch:
    """The seconds during which at least one holder is inside: those of several at a time count once.

        a  ──████████──────         inside from 2 to 10
        b  ──────████████──         inside from 6 to 14
           ══ 12 seconds ══

    Waiting inside, such as for a batch that another episode joins, counts as work: where a condenser's wait overlaps
    with sampling, the result is an upper bound of the condenser's cost. Use it from one thread.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = 0
        self._since = 0.0

    def __enter__(self) -> None:
        if not self._inside:
            self._since = time.monotonic()
        self._inside += 1

    def __exit__(self, *exception: object) -> None:
        self._inside -= 1
        if not self._inside:
            self.seconds += time.monotonic() - self._since


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The parts that play an episode. Condensers know how to condense; ``condense`` says when they are called."""

    sampler: Sampler
    writer: Sampler | None = None  # of the texts that a condenser asks for; None: ``sampler``
    expert: Expert | None = None  # of one episode, which then replies in place of the sampler
    renderer: Renderer
    condenser: Condenser
    condenser_name: str  # as declared in every Condensation
    scorers: Mapping[str, UnitScorer] = field(default_factory=dict)  # that the condenser may call, by name
    condense: CondenseSettings = field(default_factory=CondenseSettings)
    toolbox: Toolbox
    limits: Limits
    temperature: float = 1.0  # 0 is greedy
    probe: AnswerProbe | None = None  # None: what contexts know of the answer is not measured
    confidence: ConfidenceSettings | None = None  # None: no answer is drafted
    stopwatch: Stopwatch = field(default_factory=Stopwatch)  # of the condenser

    def at_step(self, step: int) -> Self:
        """The engine with the context budget of a training step; ``step`` below 0: of an evaluation."""
        budget = self.condense.budget(self.limits.max_context_tokens, step)
        return replace(self, limits=replace(self.limits, max_context_tokens=budget))

    def offering(self, tools: Sequence[EnvironmentTool]) -> Self:
        """The engine of an episode whose environment offers tools: they are in its prompts and its toolbox."""
        if not tools:
            return self
        toolbox = self.toolbox.with_tools(tools)
        return replace(self, toolbox=toolbox, renderer=self.renderer.with_tools(toolbox.template_schemas))

    def tokens_of(self, messages: Sequence[Message], tools: Sequence[EnvironmentTool]) -> int:
        """The tokens of a prompt of messages in which an environment offers tools."""
        offering = self.offering(tools)
        return offering.renderer.count(offering.toolbox.introduced(messages))
