"""One episode: from a problem to a trajectory. A failed episode is data with a stop reason, never a crash.

    prompt (condensed) ─▶ sampler ─▶ reply ─▶ tool calls? ─ yes ─▶ tools ───────┐
        ▲                                        └─ no ──▶ environment ─ done ──┼─▶ stop
        └──────────────────────────── observations ◀────────────────────────────┘

A reply with at least one tool call, well formed or not, goes to the tools only; every other reply goes to the
environment, which alone recognises an answer. In the formats ``tagged`` and ``code`` a reply with
``<answer>…</answer>`` has no call: the answer ends the episode. In the format ``native`` an answer next to a call does
not count.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from condensegrpo.core.failures import Failure
from condensegrpo.core.messages import History, Message, Unit
from condensegrpo.core.protocols import Environment, Problem, Step
from condensegrpo.core.trajectory import Finish, Rejected, Stop, Trajectory, Turn
from condensegrpo.rollout.boundary import Ended, asynchronous, checked_messages, guarded, is_own
from condensegrpo.rollout.confidence import Drafted, drafted
from condensegrpo.rollout.engine import Engine
from condensegrpo.rollout.prompt import next_prompt
from condensegrpo.rollout.sampling import Prompt, Sampled, sample
from condensegrpo.rollout.writing import Writer, texts_allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    stop: Stop
    answer: str | None = None
    detail: str = ""
    failure: Failure | None = None


@dataclass(slots=True, kw_only=True)
class _Record:
    """The turns and texts sampled so far, which survive if the episode fails."""

    trajectory: str  # its id
    seed: Callable[[int], int]
    turns: list[Turn] = field(default_factory=list)
    replies: int = 0  # turns but those that were written for a condenser
    called: int = 0  # turns that called a tool
    called_of_query: int = 0  # of which after the newest query
    rejected: list[Rejected] = field(default_factory=list)
    seeds: int = 0  # drawn so far
    drafts: int = 0  # seeds drawn for drafts of answers
    texts: int = 0  # that the condenser may ask for in one call
    own_environment: bool = False  # its code is this package's, see ``boundary.guarded``

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
        self.turns += [replace(text.turn(), kind="condense") for text in used]
        self.rejected += [
            Rejected(
                before=len(self.turns),
                prompt_ids=text.prompt.ids,
                output_ids=text.generation.token_ids,
                policy_version=text.version,
                text=text.text,
                reason=reason,
            )
            for text, reason in zip(attempts, reasons, strict=False)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reaction:
    """The response of tools or environment to a reply."""

    reply: Message
    observations: tuple[Message, ...] = ()
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    tool_attempts: int = 0
    tool_successes: int = 0
    new_query: bool = False
    tools_abandoned: int = 0
    ending: _Ending | None = None

    def turn(self, sampled: Sampled, information: float | None, draft: Drafted | None) -> Turn:
        """The turn of the reply; one constructor call, since each episode makes hundreds."""
        return Turn(
            prompt_ids=sampled.prompt.ids,
            output_ids=sampled.generation.token_ids,
            logprobs=sampled.generation.logprobs,
            policy_version=sampled.version,
            condensation=sampled.prompt.condensation,
            context=sampled.prompt.context,
            reply=self.reply,
            observations=self.observations,
            turn_rewards=self.turn_rewards,
            tool_attempts=self.tool_attempts,
            tool_successes=self.tool_successes,
            tools_abandoned=self.tools_abandoned,
            answer_logprob=information,
            draft=None if draft is None else draft.draft,
        )


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
        The trajectory with every sampled turn, also after a failure; see ``Stop`` for how it may end.
    """
    started = time.monotonic()
    record = _Record(trajectory=f"{group_id}/{sample}", seed=seed)
    ending = await _play(problem, environment, engine, draw, record)
    return Trajectory(
        id=record.trajectory,
        problem_id=problem.id,
        group_id=group_id,
        sample=sample,
        question=problem.question,
        ground_truth=problem.answer,
        turns=tuple(record.turns),
        stop=ending.stop,
        answer=ending.answer,
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
) -> _Ending:
    """The loop. Turns are recorded as they are sampled, so that a failure keeps them."""
    last: Sampled | None = None
    try:
        episode, pinned = await _started(environment, problem, engine.limits.turn_seconds)
        history = History(pinned=engine.toolbox.introduced(pinned))
        record.own_environment = is_own(episode)
        record.texts = texts_allowed(engine)
        for _ in range(engine.limits.max_turns):
            prompt, history = await _prompted(engine, history, last, draw, record)
            information = await _answer_information(engine, problem, prompt)
            draft = await _drafted(engine, prompt, record)
            if draft is not None and draft.answer is not None:
                record.turns.append(replace(draft.turn, answer_logprob=information, draft=draft.draft))
                return _Ending(stop=Stop.CONFIDENT, answer=draft.answer)
            sampled = await sample(
                engine,
                prompt,
                trajectory=record.trajectory,
                seed=record.next_seed(),
                max_tokens=engine.limits.max_output_tokens,
                stop_strings=engine.toolbox.format.stop_strings,
            )
            reaction = await _react(engine, episode, sampled, record)
            number = len(record.turns)
            record.add_reply(reaction.turn(sampled, information, draft), new_query=reaction.new_query)
            if reaction.ending is not None:
                return reaction.ending
            history = history.add(Unit(turn=number, reply=reaction.reply, results=reaction.observations))
            last = sampled
    except Ended as end:
        return _Ending(stop=end.stop, detail=end.detail, failure=end.failure)
    return _Ending(
        stop=Stop.TURN_LIMIT, detail=f"no answer in {engine.limits.max_turns} replies (rollout.limits.max_turns)"
    )


async def _prompted(
    engine: Engine, history: History, last: Sampled | None, draw: float, record: _Record
) -> tuple[Prompt, History]:
    """The next prompt, and the history with what was counted and summarised for it."""
    writer = Writer(engine, record.texts, record.trajectory, record.next_seed)
    write = writer.write_function(history, last) if last is not None else None
    try:
        upcoming = await guarded(
            partial(
                next_prompt,
                engine,
                history,
                last,
                draw=draw,
                write=write,
                writes=writer.max_texts,
                texts=writer.attempts,
            ),
            who="rendering the prompt",
            stop=Stop.ENVIRONMENT_ERROR,
            turn_seconds=engine.limits.turn_seconds,
            own=True,  # the condenser has a limit of its own
        )
        writer.check(upcoming.rejected)
    except Ended as end:
        record.add_texts(writer.attempts, [f"the episode ended: {end.detail}"] * len(writer.attempts))
        raise
    record.add_texts(writer.attempts, upcoming.rejected)
    return upcoming.prompt, upcoming.history


async def _started(
    environment: Callable[[Problem], Environment], problem: Problem, seconds: float
) -> tuple[Environment, tuple[Message, ...]]:
    return await guarded(
        partial(_start, environment, problem),
        who="starting the environment",
        stop=Stop.ENVIRONMENT_ERROR,
        turn_seconds=seconds,
        seconds=seconds,
        plugin=environment,
        own=is_own(environment),
    )


async def _start(
    environment: Callable[[Problem], Environment], problem: Problem
) -> tuple[Environment, tuple[Message, ...]]:
    episode = environment(problem)
    if not all(callable(getattr(episode, method, None)) for method in ("start", "step")):
        raise TypeError(
            f"environment() returned {episode!r:.80}, wanted an object with start() and step(), as in "
            f"return AnswerEnvironment(question=problem.question)"
        )
    return episode, checked_messages(await asynchronous(episode.start(), "start()"), "start()")


async def _answer_information(engine: Engine, problem: Problem, prompt: Prompt) -> float | None:
    """Log-probability of the ground truth after the prompt, if it is measured."""
    if engine.probe is None:
        return None
    return await guarded(
        partial(engine.probe.measure, problem, prompt.ids),
        who="measuring what the context knows of the answer",
        stop=Stop.SAMPLER_ERROR,
        turn_seconds=engine.limits.turn_seconds,
        seconds=engine.limits.turn_seconds,
        own=engine.own_probe,
    )


async def _drafted(engine: Engine, prompt: Prompt, record: _Record) -> Drafted | None:
    """A draft of the answer, if drafts are configured."""
    if engine.confidence is None:
        return None
    seed = record.draft_seed()
    return await drafted(engine, prompt, trajectory=record.trajectory, seed=seed, replies=record.replies)


async def _react(engine: Engine, environment: Environment, sampled: Sampled, record: _Record) -> _Reaction:
    """Let the tools or the environment respond to a reply. If they raise, the episode ends and the turn stays."""
    reply = Message(role="assistant", content=sampled.text)
    if sampled.generation.finish is Finish.LENGTH:
        detail = f"a reply was cut off at {len(sampled.generation.token_ids)} tokens (rollout.limits.max_output_tokens)"
        return _Reaction(reply=reply, ending=_Ending(stop=Stop.OUTPUT_LENGTH, detail=detail))
    exhausted = engine.toolbox.exhausted(turns=record.called, turns_of_query=record.called_of_query)
    if exhausted and engine.toolbox.format.parse(sampled.text):
        detail = f"a reply called a tool after {exhausted}"
        return _Reaction(reply=reply, ending=_Ending(stop=Stop.TURN_LIMIT, detail=detail))
    try:
        answers = await guarded(  # each call has the toolbox's own time limit
            partial(engine.toolbox.answer, sampled.text),
            who="the tools",
            stop=Stop.ENVIRONMENT_ERROR,
            turn_seconds=engine.limits.turn_seconds,
            own=True,
        )
        if answers.attempted:
            return _Reaction(
                reply=replace(reply, tool_calls=tuple(answers.calls)),
                observations=tuple(answers.messages),
                tool_attempts=answers.attempted,
                tool_successes=answers.succeeded,
                tools_abandoned=answers.abandoned,
            )
        step = await guarded(
            partial(_step, environment, reply),
            who="the environment",
            stop=Stop.ENVIRONMENT_ERROR,
            turn_seconds=engine.limits.turn_seconds,
            seconds=engine.limits.turn_seconds,
            plugin=environment,
            own=record.own_environment,
        )
    except Ended as end:
        return _Reaction(reply=reply, ending=_Ending(stop=end.stop, detail=end.detail, failure=end.failure))
    return _Reaction(
        reply=reply,
        observations=step.observations,
        turn_rewards=step.turn_rewards,
        new_query=step.new_query,
        ending=_ending(step),
    )


async def _step(environment: Environment, reply: Message) -> Step:
    """The environment's response, checked here: a wrong type would otherwise fail later, when a file is written."""
    step = await asynchronous(environment.step(reply), "step()")
    if not isinstance(step, Step):
        raise TypeError(f'step() returned {step!r:.80}, wanted a Step, as in return Step(done=True, answer="4")')
    if not isinstance(step.answer, str | None):
        raise TypeError(f"step() returned the answer {step.answer!r:.80}, wanted text or None")
    rewards = {str(name): float(value) for name, value in step.turn_rewards.items()}
    if not all(map(math.isfinite, rewards.values())):
        raise ValueError(f"step() returned the turn rewards {rewards}, wanted finite numbers")
    return Step(
        observations=checked_messages(step.observations, "step()"),
        done=step.done,
        answer=step.answer,
        turn_rewards=rewards,
        new_query=step.new_query,
    )


def _ending(step: Step) -> _Ending | None:
    if not step.done:
        return None
    if step.answer is None:
        return _Ending(stop=Stop.FORMAT, detail="the environment could not read a reply and ended the episode")
    return _Ending(stop=Stop.ANSWERED, answer=step.answer)
