"""One episode: from a problem to a trajectory. A failed episode is data with a stop reason, never a crash.

    prompt (condensed) ─▶ sampler ─▶ reply ─▶ tool calls? ─ yes ─▶ tools ───────┐
        ▲                                        └─ no ──▶ environment ─ done ──┼─▶ stop
        └──────────────────────────── observations ◀────────────────────────────┘

A reply with at least one tool call, well formed or not, goes to the tools only; every other reply goes to the
environment, which alone recognises an answer. An environment that is one of ``AnswersCalls`` gets every reply. In the
formats ``tagged`` and ``code`` a reply with ``<answer>…</answer>`` has no call: the answer ends the episode. In the
format ``native`` an answer next to a call does not count.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from condensegrpo.core.condenser import with_tokens
from condensegrpo.core.messages import History, Message, Unit
from condensegrpo.core.protocols.environment import ClosableEnvironment, Environment, RewrittenHistory
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.protocols.tool import OffersTools
from condensegrpo.core.trajectory import Rejected, StopReason, Trajectory, Turn
from condensegrpo.episodes.boundary import (
    Boundary,
    EndEpisode,
    called,
    checked_tools,
    first_messages,
)
from condensegrpo.episodes.confidence import Drafted, drafted
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.prompt import AnsweredView, View, answered, next_view
from condensegrpo.episodes.reaction import EpisodeEnd, StartedEnvironment, metered, react
from condensegrpo.episodes.sampling import Sampled, sample
from condensegrpo.episodes.writing import SummaryWriter, texts_allowed


@dataclass(slots=True, kw_only=True)
class _Record:
    """The turns and texts sampled so far, which survive if the episode fails."""

    trajectory: str  # names it to samplers: the id alone is that of an evaluation after the same step, too
    seed: Callable[[int], int]
    turns: list[Turn] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)  # every reply with what answered it
    replies: int = 0  # turns but those that were written for a condenser
    called: int = 0  # turns that called a tool
    called_of_query: int = 0  # of which after the newest query
    rejected: list[Rejected] = field(default_factory=list)
    seeds: int = 0  # drawn so far
    drafts: int = 0  # seeds drawn for drafts of answers
    texts: int = 0  # that the condenser may ask for in one call
    environment: Environment | None = None  # as soon as there is one, so that it is closed however the episode ends

    def next_seed(self) -> int:
        """The seed of the next text of the episode, used or not."""
        self.seeds += 1
        return self.seed(self.seeds - 1)

    def draft_seed(self) -> int:
        """The seed of the next draft, from a separate stream, so that drafts change no other text."""
        self.drafts += 1
        return self.seed(-self.drafts)

    def add_reply(self, turn: Turn, *, new_query: bool) -> None:
        """Record a turn; ``new_query``: a further query follows it."""
        self.turns.append(turn)
        self.replies += 1
        self.called += turn.tool_attempts > 0
        self.called_of_query = 0 if new_query else self.called_of_query + (turn.tool_attempts > 0)

    def add_texts(self, attempts: Sequence[Sampled], reasons: Sequence[str]) -> None:
        """Record the texts that the policy wrote for a condenser: one rejected for each reason, then the used one."""
        used = attempts[len(reasons) :]
        self.turns += [text.turn(kind="condense") for text in used]
        self.rejected += [
            Rejected(
                before=len(self.turns),
                prompt_ids=text.view.ids,
                output_ids=text.generation.token_ids,
                policy_version=text.version,
                text=text.text,
                reason=reason,
            )
            for text, reason in zip(attempts, reasons, strict=False)
        ]


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
    record = _Record(trajectory=f"{seed(0)}/{group_id}/{sample}", seed=seed)
    try:
        ending = await _play(problem, environment, engine, draw, record)
    finally:
        failed = await _closed(record, engine.limits.turn_seconds)
    ending = failed or ending
    return Trajectory(
        id=f"{group_id}/{sample}",
        problem_id=problem.id,
        group_id=group_id,
        sample=sample,
        question=problem.question,
        ground_truth=problem.answer,
        turns=tuple(record.turns),
        stop=ending.stop,
        answer=ending.answer,
        outcome=ending.outcome,
        seconds=time.monotonic() - started,
        detail=ending.detail,
        failure=ending.failure,
        rejected=tuple(record.rejected),
    )


async def _play(
    problem: Problem,
    environment: Callable[[Problem], Environment],
    engine: Engine,
    draw: float,
    record: _Record,
) -> EpisodeEnd:
    """The loop. Turns are recorded as they are sampled, so that a failure keeps them."""
    last: AnsweredView | None = None
    rewritten: RewrittenHistory | None = None
    try:
        opened, pinned = await _started(environment, problem, engine, record)
        run_engine, engine = engine, _offering(engine, opened)
        history = History(pinned=engine.toolbox.introduced(pinned))
        record.texts = texts_allowed(engine)
        for _ in range(engine.limits.max_turns):
            view, history = await _viewed(engine, history, last, rewritten, draw, record)
            information = await _answer_information(engine, problem, view)
            draft = await _drafted(engine, view, record)
            if draft is not None and draft.answer is not None:
                record.turns.append(replace(draft.turn, answer_logprob=information, draft=draft.draft))
                return EpisodeEnd(stop=StopReason.CONFIDENT, answer=draft.answer)
            sampled = await sample(
                engine,
                view,
                trajectory=record.trajectory,
                seed=record.next_seed(),
                max_tokens=engine.limits.max_output_tokens,
                stop_strings=(*engine.toolbox.format.stop_strings, *_stop_strings(opened)),
            )
            exhausted = engine.toolbox.exhausted(turns=record.called, turns_of_query=record.called_of_query)
            began = time.monotonic()
            reaction = await react(engine, opened, history, sampled, exhausted)
            seconds = time.monotonic() - began
            number = len(record.turns)
            with Boundary("rendering the meter"):
                reaction = await metered(engine, sampled, reaction, turn=number, draw=draw)
            record.add_reply(reaction.turn(sampled, information, draft, seconds), new_query=reaction.new_query)
            if reaction.ending is not None:
                return reaction.ending
            unit = Unit(turn=number, reply=reaction.reply, results=reaction.observations, pinned=reaction.new_query)
            with Boundary("rendering the prompt"):
                last = answered(engine, history.pinned, view, sampled.generation.token_ids, unit)
            record.units.append(last.unit)
            history, rewritten = history.add(last.unit), None
            if reaction.rewritten is not None:
                last, history = None, replace(history, units=tuple(record.units))
                engine = _offering(run_engine, opened)
                rewritten = _numbered(engine, reaction.rewritten, history.units)
    except EndEpisode as end:
        return EpisodeEnd(stop=end.stop, detail=end.detail, failure=end.failure)
    return EpisodeEnd(
        stop=StopReason.TURN_LIMIT, detail=f"no answer in {engine.limits.max_turns} replies (rollout.limits.max_turns)"
    )


async def _viewed(
    engine: Engine,
    history: History,
    last: AnsweredView | None,
    rewritten: RewrittenHistory | None,
    draw: float,
    record: _Record,
) -> tuple[View, History]:
    """The next view, and the history with what a condenser wrote for it."""
    writer = SummaryWriter(engine, record.texts, record.trajectory, record.next_seed)
    shown = history if rewritten is None else rewritten.history
    write = writer.write_function(shown, last) if shown.units else None
    try:
        with Boundary("rendering the prompt"):
            upcoming = await next_view(
                engine,
                history,
                last,
                draw=draw,
                write=write,
                writes=writer.max_texts,
                texts=writer.attempts,
                rewritten=rewritten,
            )
        writer.check(upcoming.rejected)
    except EndEpisode as end:
        record.add_texts(writer.attempts, [f"the episode ended: {end.detail}"] * len(writer.attempts))
        raise
    record.add_texts(writer.attempts, upcoming.rejected)
    return upcoming.view, upcoming.history


async def _started(
    environment: Callable[[Problem], Environment], problem: Problem, engine: Engine, record: _Record
) -> tuple[StartedEnvironment, tuple[Message, ...]]:
    """The environment and its first messages."""

    seconds = engine.limits.turn_seconds
    async with Boundary("starting the environment", seconds=seconds, plugin=environment):
        episode = record.environment = environment(problem)  # closed even if it has no start() or step()
        pinned = engine.renderer.store_media(await first_messages(episode))
        return StartedEnvironment.of(episode), pinned


def _offering(engine: Engine, opened: StartedEnvironment) -> Engine:
    """The engine with the tools of the environment in its prompts and its toolbox."""
    environment = opened.environment
    decided = bool(engine.condenser.tools())
    if opened.answers_calls is not None and (decided or engine.trigger.meter != "none"):
        raise EndEpisode(
            StopReason.ENVIRONMENT_ERROR,
            "its environment answers every call and keeps the conversation itself, so that neither the tools of the "
            "condenser nor a meter reach the policy; choose a condenser without tools and rollout.condense.meter=none",
        )
    with Boundary("the tools of the environment", plugin=environment):
        return engine.offering(checked_tools(environment.tools()) if isinstance(environment, OffersTools) else ())


def _stop_strings(opened: StartedEnvironment) -> tuple[str, ...]:
    """What ends the next reply, if the environment has a say in it."""
    if opened.answers_calls is None:
        return ()
    with Boundary("the environment", plugin=opened.environment):
        return tuple(opened.answers_calls.stop_strings)


def _numbered(engine: Engine, rewritten: RewrittenHistory, raw: Sequence[Unit]) -> RewrittenHistory:
    """A rewritten history with the turns of its replies, and with results as the tool format shows them."""
    with Boundary("the environment"):
        units = (
            replace(
                unit, turn=raw[unit.turn].turn, results=engine.toolbox.shown(engine.renderer.store_media(unit.results))
            )
            for unit in rewritten.history.units
        )
        pinned = engine.toolbox.introduced(engine.renderer.store_media(rewritten.history.pinned))
        return replace(
            rewritten, history=with_tokens(History(pinned=pinned, units=tuple(units)), engine.renderer.count)
        )


async def _closed(record: _Record, seconds: float) -> EpisodeEnd | None:
    """Close the environment, if there is one that can be closed; the ending of an episode that could not be.

    A cancellation of the episode does not interrupt it, and is raised afterwards: a batch that stops while some of its
    environments are being closed would otherwise leave their processes and files open.
    """
    environment = record.environment
    if not isinstance(environment, ClosableEnvironment):
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


async def _close(environment: ClosableEnvironment, seconds: float) -> EpisodeEnd | None:
    try:
        async with Boundary("closing the environment", seconds=seconds, plugin=environment):
            await called(environment.close)
    except EndEpisode as end:
        return EpisodeEnd(stop=end.stop, detail=end.detail, failure=end.failure)
    return None


async def _answer_information(engine: Engine, problem: Problem, view: View) -> float | None:
    """Log-probability of the ground truth after the prompt, if it is measured."""
    if engine.probe is None:
        return None
    who, seconds = "measuring what the context knows of the answer", engine.limits.turn_seconds
    async with Boundary(who, stop=StopReason.SAMPLER_ERROR, seconds=seconds):
        return await engine.probe.measure(problem, view.ids, view.media)


async def _drafted(engine: Engine, view: View, record: _Record) -> Drafted | None:
    """A draft of the answer, if drafts are configured."""
    if engine.confidence is None:
        return None
    seed = record.draft_seed()
    return await drafted(engine, view, trajectory=record.trajectory, seed=seed, replies=record.replies)
