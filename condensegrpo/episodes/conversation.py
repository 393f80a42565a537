"""One episode so far: what the policy was shown, what it said, and what answered it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from condensegrpo.core.messages import History, Message, Unit
from condensegrpo.core.protocols.environment import Environment, RewrittenHistory, Step
from condensegrpo.core.trajectory import Draft, FinishReason, Rejected, Turn
from condensegrpo.episodes.boundary import Boundary, EndEpisode
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.parsing import ParsedReply
from condensegrpo.episodes.toolcalls import NO_CALLS, ToolAnswers
from condensegrpo.episodes.view import AnsweredView, View, answered

NOTHING = Step()


class SampledReply(NamedTuple):
    """The tokens that the policy sampled, and the reply that they are."""

    token_ids: tuple[int, ...]  # (A,)
    logprobs: tuple[float, ...]  # (A,) nats, as in ``Generation``
    finish: FinishReason
    reply: ParsedReply
    version: int  # of the policy at the request
    frozen: bool = False  # by the engine's writer


class Response(NamedTuple):
    """The response to a reply: the answers of tools, or the step of the environment."""

    reply: Message  # with the calls that were read
    step: Step = NOTHING
    tools: ToolAnswers = NO_CALLS
    seconds: float | None = None  # that they took; None: neither saw the reply
    end: EndEpisode | None = None


class WrittenText(NamedTuple):
    """A text that the policy wrote for a condenser."""

    view: View
    output: SampledReply


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The state of one episode. Its turns and texts survive if the episode fails."""

    name: str  # of the trajectory, to samplers: the id alone is that of an evaluation after the same step, too
    seed: Callable[[int], int]
    draw: float  # in [0, 1), of the problem: selects a point in the jitter of the trigger
    engine: Engine  # with the tools of the environment, once it has started
    environment: Environment = field(default_factory=Environment)  # replaced as soon as there is one, to be closed
    max_texts: int = 0  # that the condenser may ask for in one call
    history: History = field(default_factory=lambda: History(pinned=()))
    last: AnsweredView | None = None  # None before the first turn, and after the environment rewrote the history
    rewritten: RewrittenHistory | None = None  # what the environment made of ``history``
    turns: list[Turn] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)  # every reply with what answered it
    rejected: list[Rejected] = field(default_factory=list)
    replies: int = 0  # turns but those that were written for a condenser
    tool_turns: int = 0  # turns that called a tool
    tool_turns_of_query: int = 0  # of which after the newest query
    seeds_drawn: int = 0  # for texts
    drafts: int = 0  # seeds drawn for drafts of answers

    def next_seed(self) -> int:
        """The seed of the next text of the episode, used or not."""
        self.seeds_drawn += 1
        return self.seed(self.seeds_drawn - 1)

    def draft_seed(self) -> int:
        """The seed of the next draft, from a separate stream, so that drafts change no other text."""
        self.drafts += 1
        return self.seed(-self.drafts)

    def turn(self, view: View, output: SampledReply, reply: Message) -> Turn:
        """The turn of a view and its output, without what followed."""
        pictures, ids = self.engine.renderer.pictures, tuple(view.ids) if view.media else ()
        return Turn(
            prompt_ids=view.ids,
            output_ids=output.token_ids,
            logprobs=output.logprobs,
            policy_version=output.version,
            frozen=output.frozen,
            condensation=view.condensation,
            context=view.context,
            reply=reply,
            media=view.media,
            picture_starts=tuple(span.start for span in self.engine.renderer.picture_spans(ids, view.media)),
            picture_tokens=0 if pictures is None else ids.count(pictures.placeholder_id),
        )

    def add(
        self, view: View, output: SampledReply, response: Response, *, answer_logprob: float | None, draft: Draft | None
    ) -> None:
        """Record a turn; unless it ends the episode, it is part of the history."""
        reply, step, tools, seconds, end = response
        number, attempts = len(self.turns), tools.attempted
        self.turns.append(
            replace(
                self.turn(view, output, reply),
                observations=step.observations,
                turn_rewards=step.turn_rewards,
                tool_attempts=attempts,
                tool_successes=tools.succeeded,
                tools_abandoned=tools.abandoned,
                tool_seconds=seconds,
                answer_logprob=answer_logprob,
                draft=draft,
            )
        )
        self.replies += 1
        self.tool_turns += attempts > 0
        self.tool_turns_of_query = 0 if step.new_query else self.tool_turns_of_query + (attempts > 0)
        if end is not None:
            return
        unit = Unit(turn=number, reply=reply, results=step.observations, pinned=step.new_query)
        with Boundary("rendering the prompt"):
            self.last = answered(self.engine, self.history.pinned, view, output.token_ids, unit)
        self.units.append(self.last.unit)
        self.history, self.rewritten = self.history.add(self.last.unit), None

    def add_texts(self, texts: Sequence[WrittenText], reasons: Sequence[str]) -> None:
        """Record the texts that the policy wrote for a condenser: one rejected for each reason, then the used one."""
        for view, output in texts[len(reasons) :]:
            self.turns.append(replace(self.turn(view, output, output.reply.message), kind="condense"))
        self.rejected += [
            Rejected(
                before=len(self.turns),
                prompt_ids=view.ids,
                output_ids=output.token_ids,
                policy_version=output.version,
                text=self.engine.renderer.text(output.token_ids),
                reason=reason,
            )
            for (view, output), reason in zip(texts, reasons, strict=False)
        ]
