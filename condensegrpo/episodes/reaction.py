"""What follows from a reply: the tools that it calls, or the environment; both may end the episode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from condensegrpo.core.failures import PluginFailure
from condensegrpo.core.messages import History, Message, ToolCall, meter_line
from condensegrpo.core.protocols.environment import (
    AnswersCalls,
    Environment,
    ReadsFinish,
    ReadsHistory,
    RewrittenHistory,
    Step,
)
from condensegrpo.core.protocols.tool import ToolResult
from condensegrpo.core.trajectory import FinishReason, StopReason, Turn
from condensegrpo.episodes.boundary import (
    Boundary,
    EndEpisode,
    called,
    check_done,
    checked_end,
    checked_rewards,
    checked_step,
)
from condensegrpo.episodes.confidence import Drafted
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.sampling import Sampled
from condensegrpo.episodes.toolcalls import is_success


class StartedEnvironment(NamedTuple):
    """The environment of an episode and what it has beyond ``Environment``, looked up once: a look is slow."""

    environment: Environment
    answers_calls: AnswersCalls | None
    reads_history: ReadsHistory | None
    reads_finish: ReadsFinish | None

    @classmethod
    def of(cls, environment: Environment) -> Self:
        """An environment that has started."""
        return cls(
            environment=environment,
            answers_calls=environment if isinstance(environment, AnswersCalls) else None,
            reads_history=environment if isinstance(environment, ReadsHistory) else None,
            reads_finish=environment if isinstance(environment, ReadsFinish) else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """How an episode ended."""

    stop: StopReason
    answer: str | None = None
    outcome: float | None = None
    detail: str = ""
    failure: PluginFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """The response of tools or environment to a reply."""

    reply: Message
    observations: tuple[Message, ...] = ()
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    tool_attempts: int = 0
    tool_successes: int = 0
    new_query: bool = False
    tools_abandoned: int = 0
    rewritten: RewrittenHistory | None = None
    ending: EpisodeEnd | None = None
    responded: bool = True  # False: the episode ended before tools or environment saw the reply

    def turn(self, sampled: Sampled, information: float | None, draft: Drafted | None, seconds: float) -> Turn:
        """The turn of the reply."""
        return sampled.turn(
            self.reply,
            observations=self.observations,
            turn_rewards=self.turn_rewards,
            tool_attempts=self.tool_attempts,
            tool_successes=self.tool_successes,
            tools_abandoned=self.tools_abandoned,
            tool_seconds=round(seconds, 6) if self.responded else None,
            answer_logprob=information,
            draft=None if draft is None else draft.draft,
        )


async def react(
    engine: Engine, opened: StartedEnvironment, history: History, sampled: Sampled, exhausted: str | None
) -> Reaction:
    """Let the tools or the environment respond to a reply. If they raise, the episode ends and the turn stays.

    Args:
        history: before the reply.
        exhausted: which limit allows no more calls, in words; None: none.
    """
    reply = sampled.read.message
    if engine.limits.ends_at_cut and sampled.generation.finish is FinishReason.LENGTH:
        detail = f"a reply was cut off at {len(sampled.generation.token_ids)} tokens (rollout.limits.max_output_tokens)"
        return Reaction(reply=reply, ending=EpisodeEnd(stop=StopReason.OUTPUT_LENGTH, detail=detail), responded=False)
    try:
        with Boundary("the tools"):  # each call has the toolbox's own time limit
            if exhausted and engine.toolbox.calls_in(sampled.read):
                detail = f"a reply called a tool after {exhausted}"
                return Reaction(
                    reply=reply, ending=EpisodeEnd(stop=StopReason.TURN_LIMIT, detail=detail), responded=False
                )
            if opened.answers_calls is not None:
                return await _answered(engine, opened, history, sampled)
            answers = await engine.toolbox.answer(sampled.read, replace(history, shown=sampled.view.units))
        if answers.attempted:
            rewards, ending = _rewards_and_ending(answers.results)
            return Reaction(
                reply=replace(reply, tool_calls=tuple(answers.calls)),
                observations=engine.renderer.store_media(answers.messages),
                turn_rewards=rewards,
                tool_attempts=answers.attempted,
                tool_successes=answers.succeeded,
                tools_abandoned=answers.abandoned,
                ending=ending,
            )
    except EndEpisode as end:
        return Reaction(reply=reply, ending=EpisodeEnd(stop=end.stop, detail=end.detail, failure=end.failure))
    return await _stepped(engine, opened, history, reply, sampled.generation.finish)


async def _answered(engine: Engine, opened: StartedEnvironment, history: History, sampled: Sampled) -> Reaction:
    """The response of an environment that answers tool calls itself. Calls that ended the episode did not fail."""
    calls = engine.toolbox.calls_in(sampled.read)
    reply = replace(sampled.read.message, tool_calls=tuple(call for call in calls if isinstance(call, ToolCall)))
    reaction = await _stepped(engine, opened, history, reply, sampled.generation.finish)
    results = [message.text for message in reaction.observations if message.role == "tool"]
    ended = reaction.ending is not None and reaction.ending.failure is None
    unanswered = len(reply.tool_calls) - len(results) if ended else 0
    return replace(
        reaction,
        observations=engine.toolbox.shown(reaction.observations),
        tool_attempts=len(calls),
        tool_successes=min(sum(map(is_success, results)) + max(unanswered, 0), len(reply.tool_calls)),
    )


async def _stepped(
    engine: Engine, opened: StartedEnvironment, history: History, reply: Message, finish: FinishReason
) -> Reaction:
    """The response of the environment."""
    try:
        async with Boundary("the environment", seconds=engine.limits.turn_seconds, plugin=opened.environment):
            step = await _step(engine, opened, history, reply, finish)
    except EndEpisode as end:
        return Reaction(reply=reply, ending=EpisodeEnd(stop=end.stop, detail=end.detail, failure=end.failure))
    return Reaction(
        reply=reply,
        observations=step.observations,
        turn_rewards=step.turn_rewards,
        new_query=step.new_query,
        rewritten=step.rewritten,
        ending=_ending(done=step.done, answer=step.answer, outcome=step.outcome),
    )


async def _step(
    engine: Engine, opened: StartedEnvironment, history: History, reply: Message, finish: FinishReason
) -> Step:
    if opened.reads_history is not None:
        opened.reads_history.read_history(history)
    if opened.reads_finish is not None:
        opened.reads_finish.read_finish(finish)
    step = checked_step(await called(opened.environment.step, reply))
    return replace(step, observations=engine.renderer.store_media(step.observations))


def _rewards_and_ending(results: Sequence[ToolResult]) -> tuple[Mapping[str, float], EpisodeEnd | None]:
    """What the tools of the environment gave besides text: turn rewards are added, the first that is done ends it."""
    rewards: dict[str, float] = {}
    with Boundary("the environment"):
        for result in results:
            check_done(result, "a tool")
            for name, value in checked_rewards(result.turn_rewards, "a tool").items():
                rewards[name] = rewards.get(name, 0.0) + value
        last = next((result for result in results if result.done), None)
        if last is None:
            return rewards, None
        answer, outcome = checked_end(last.answer, last.outcome, "a tool")
    return rewards, _ending(done=True, answer=answer, outcome=outcome)


def _ending(*, done: bool, answer: str | None, outcome: float | None) -> EpisodeEnd | None:
    if not done:
        return None
    if answer is not None:
        return EpisodeEnd(stop=StopReason.ANSWERED, answer=answer, outcome=outcome)
    if outcome is not None:
        return EpisodeEnd(stop=StopReason.FINISHED, outcome=outcome)
    return EpisodeEnd(stop=StopReason.FORMAT, detail="the environment could not read a reply and ended the episode")


async def metered(engine: Engine, sampled: Sampled, reaction: Reaction, *, turn: int, draw: float) -> Reaction:
    """A reaction whose last observation ends with the line of the meter, if there is a meter and an observation.

    The line holds the number of the turn, and the used and free tokens. It is never changed, so that later prompts
    continue by token ids. Used are the tokens of the prompt that would come next, before a condenser rewrites it and
    without the line itself.

    Args:
        turn: that sampled the reply.
        draw: of the problem, see ``next_prompt``.
    """
    trigger, observations = engine.trigger, reaction.observations
    if trigger.meter == "none" or not observations or reaction.ending is not None:
        return reaction
    tokens = None
    if trigger.meter == "tokens":
        view, output = sampled.view, sampled.generation.token_ids
        added = engine.renderer.continuation(view.context, reaction.reply, observations, output, view.ids)
        used = len(view.ids) + len(output) + len(added)
        tokens = used, trigger.target_tokens(engine.limits.max_context_tokens, draw)
    *before, last = observations
    return replace(reaction, observations=(*before, last.followed_by(meter_line(turn, tokens))))
