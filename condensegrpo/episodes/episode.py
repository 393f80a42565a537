"""One episode: from a problem to a trajectory. A failed episode is data with a stop reason, never a crash.

    prompt (condensed) ─▶ sampler ─▶ reply ─▶ tool calls? ─ yes ─▶ tools ───────┐
        ▲                                        └─ no ──▶ environment ─ done ──┼─▶ stop
        └──────────────────────────── observations ◀────────────────────────────┘

A reply with at least one tool call, well formed or not, goes to the tools only; every other reply goes to the
environment, which alone recognises an answer. An environment with ``stop_strings`` gets every reply. In the formats
``tagged`` and ``code`` a reply with ``<answer>…</answer>`` has no call: the answer ends the episode. In the format
``native`` an answer next to a call does not count.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from condensegrpo.core.condenser import with_tokens
from condensegrpo.core.defaults import overrides, with_defaults
from condensegrpo.core.messages import History, Unit
from condensegrpo.core.protocols.environment import Environment, RewrittenHistory
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.boundary import Boundary, EndEpisode, call_method, checked_tools, first_messages
from condensegrpo.episodes.confidence import draft_answer
from condensegrpo.episodes.conversation import Conversation
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.prompt import next_view
from condensegrpo.episodes.reaction import respond
from condensegrpo.episodes.sampling import sample
from condensegrpo.episodes.view import View


async def run_episode(
    problem: Problem,
    *,
    environment: Callable[[Problem], Environment],
    engine: Engine,
    group_id: str,
    sample: int,
    seed: Callable[[int], int],
    draw: float = 0.0,
) -> Trajectory:
    """Play one episode to its end.

    Args:
        environment: makes the environment of this episode, as ``Task.environment`` does.
        sample: number of the episode in its group, from 0; the id of the trajectory is ``group_id/sample``.
        seed: n → seed of the random stream of the nth text of the episode. Condense turns and rejected texts count;
            without any, n is the turn. Below 0: of drafts, −1 the first.
        draw: in [0, 1), of the problem, equal for its trajectories: selects a point in the jitter of the trigger.

    Returns:
        The trajectory with every sampled turn, also after a failure; see ``StopReason`` for how it may end.
    """
    started = time.monotonic()
    conversation = Conversation(name=f"{seed(0)}/{group_id}/{sample}", seed=seed, draw=draw, engine=engine)
    try:
        end = await _play(problem, environment, conversation)
    finally:
        failed = await _closed(conversation.environment, engine.limits.turn_seconds)
    end = failed or end
    return Trajectory(
        id=f"{group_id}/{sample}",
        problem_id=problem.id,
        group_id=group_id,
        sample=sample,
        question=problem.question,
        ground_truth=problem.answer,
        turns=tuple(conversation.turns),
        stop=end.stop,
        answer=end.answer,
        outcome=end.outcome,
        seconds=time.monotonic() - started,
        detail=end.detail,
        failure=end.failure,
        rejected=tuple(conversation.rejected),
    )


async def _play(
    problem: Problem, environment: Callable[[Problem], Environment], conversation: Conversation
) -> EndEpisode:
    """The loop. Turns are recorded as they are sampled, so that a failure keeps them."""
    run_engine = conversation.engine
    try:
        await _start(problem, environment, conversation)
        for _ in range(run_engine.limits.max_turns):
            view = await next_view(conversation)
            information = await _answer_information(conversation.engine, problem, view)
            drafted = await draft_answer(conversation, view)
            if drafted is not None and drafted.answer is not None:
                conversation.turns.append(replace(drafted.turn, answer_logprob=information, draft=drafted.draft))
                return EndEpisode(StopReason.CONFIDENT, answer=drafted.answer)
            output = await sample(
                conversation,
                view,
                seed=conversation.next_seed(),
                max_tokens=run_engine.limits.max_output_tokens,
                stop_strings=_stop_strings(conversation),
            )
            response = await respond(conversation, view, output)
            conversation.add(
                view, output, response, answer_logprob=information, draft=None if drafted is None else drafted.draft
            )
            if response.end is not None:
                return response.end
            if response.step.rewritten is not None:
                _rewrite(conversation, run_engine, response.step.rewritten)
    except EndEpisode as end:
        return end
    return EndEpisode(
        StopReason.TURN_LIMIT, f"no answer in {run_engine.limits.max_turns} replies (rollout.limits.max_turns)"
    )


async def _start(problem: Problem, environment: Callable[[Problem], Environment], conversation: Conversation) -> None:
    """Start the environment: its first messages begin the history, its tools are offered."""
    engine = conversation.engine
    async with Boundary("starting the environment", seconds=engine.limits.turn_seconds, plugin=environment):
        given = environment(problem)
        if isinstance(given, type):
            raise TypeError(f"environment() returned the class {given.__name__}, wanted an object: {given.__name__}(…)")
        conversation.environment = with_defaults(given, Environment)  # closed even if it has no start() or step()
        conversation.environment.count_with(engine.tokens_of)
        pinned = engine.renderer.store_media(await first_messages(given, problem))
    engine = conversation.engine = _offering(engine, conversation.environment)
    conversation.history = History(pinned=engine.toolbox.introduced(pinned))
    with Boundary(f"the condenser {engine.condenser_name!r}", plugin=engine.condenser):
        conversation.max_texts = engine.condenser.writes


def _offering(engine: Engine, environment: Environment) -> Engine:
    """The engine with the tools of the environment in its prompts and its toolbox."""
    with Boundary("the tools of the environment", plugin=environment):
        decided = bool(engine.condenser.tools())
        if environment.stop_strings is not None and (decided or engine.condense.meter != "none"):
            raise EndEpisode(
                StopReason.ENVIRONMENT_ERROR,
                "its environment answers every call and keeps the conversation itself, so that neither the tools of "
                "the condenser nor a meter reach the policy; choose a condenser without tools and "
                "rollout.condense.meter=none",
            )
        return engine.offering(checked_tools(environment.tools()))


def _stop_strings(conversation: Conversation) -> tuple[str, ...]:
    """The strings that end the next reply."""
    with Boundary("the environment", plugin=conversation.environment):
        return (*conversation.engine.toolbox.format.stop_strings, *(conversation.environment.stop_strings or ()))


def _rewrite(conversation: Conversation, run_engine: Engine, rewritten: RewrittenHistory) -> None:
    """Go on with a rewritten history, with the turns of its replies and results as the tool format shows them."""
    raw = tuple(conversation.units)
    engine = _offering(run_engine, conversation.environment)
    with Boundary("the environment"):
        units = list[Unit]()
        for unit in rewritten.history.units:
            results = engine.toolbox.shown(engine.renderer.store_media(unit.results))
            units.append(replace(unit, turn=raw[unit.turn].turn, results=results))
        pinned = engine.toolbox.introduced(engine.renderer.store_media(rewritten.history.pinned))
        history = with_tokens(History(pinned=pinned, units=tuple(units)), engine.renderer.count)
    conversation.engine, conversation.last = engine, None
    conversation.history = replace(conversation.history, units=raw)
    conversation.rewritten = replace(rewritten, history=history)


async def _closed(environment: Environment, seconds: float) -> EndEpisode | None:
    """Close the environment; the end of an episode whose environment could not be closed.

    A cancellation of the episode does not interrupt it, and is raised afterwards: a batch that stops while some of its
    environments are being closed would otherwise leave their processes and files open.
    """
    if not overrides(environment, Environment.close):
        return None
    closing = asyncio.create_task(_close(environment, seconds))
    cancelled: asyncio.CancelledError | None = None
    while not closing.done():
        try:
            await asyncio.wait([closing])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return closing.result()


async def _close(environment: Environment, seconds: float) -> EndEpisode | None:
    try:
        async with Boundary("closing the environment", seconds=seconds, plugin=environment):
            await call_method(environment.close)
    except EndEpisode as end:
        return end
    return None


async def _answer_information(engine: Engine, problem: Problem, view: View) -> float | None:
    """Log-probability of the ground truth after the prompt, if it is measured."""
    if engine.probe is None:
        return None
    source, seconds = "measuring what the context knows of the answer", engine.limits.turn_seconds
    async with Boundary(source, stop=StopReason.SAMPLER_ERROR, seconds=seconds):
        return await engine.probe.measure(problem, view.ids, view.media)
