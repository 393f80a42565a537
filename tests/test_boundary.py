"""The line between the engine and what others wrote: whatever is past it costs its own episode, and is named."""

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import pytest
from talk import Counting, agent, counting, engine, ignore, problem, said, simulated

from condensegrpo.core.condenser import Budget, Condensed, Condenser
from condensegrpo.core.errors import ContextOverflow
from condensegrpo.core.messages import History, MediaPart, Message, TextPart, checked_messages
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.sampler import NamedTensors
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams, StopReason, Trajectory
from condensegrpo.episodes.boundary import Boundary, EndEpisode, call_method
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.group import problem_groups, rollout_groups
from condensegrpo.storage import codec

Play = Callable[[], Coroutine[Any, Any, Any]]


def ended(work: Play, seconds: float | None = None) -> EndEpisode:
    """How the work of a plug-in ended."""

    async def run() -> EndEpisode:
        with pytest.raises(EndEpisode) as caught:
            async with Boundary("it", seconds=seconds):
                await work()
        return caught.value

    return asyncio.run(run())


def roll(parts: Engine, environment: Callable[[Problem], Any] = Counting) -> tuple[Trajectory, ...]:
    """One trajectory of the question ``fault`` and one of ``count``."""
    problems = problem_groups([problem(0, "fault"), problem(1, "count")], 7)
    groups = simulated(
        rollout_groups(
            problems,
            samples=1,
            environment=environment,
            engine=parts,
            run_seed=0,
            step=0,
            on_finish=ignore,
        )
    )
    return tuple(one for group in groups for one in group)


# --- the boundary -----------------------------------------------------------------------------------------------------


class Panic(BaseException):
    """As pyo3's PanicException, which a Rust extension raises: no Exception."""


@pytest.mark.parametrize(
    ("error", "stop", "detail"),
    [
        (KeyError("lost"), StopReason.ENVIRONMENT_ERROR, "it: KeyError: 'lost'"),
        (SystemExit(0), StopReason.ENVIRONMENT_ERROR, "it: SystemExit: 0"),
        (Panic("rust"), StopReason.ENVIRONMENT_ERROR, "it: Panic: rust"),
        (TimeoutError("its own"), StopReason.ENVIRONMENT_ERROR, "it: TimeoutError: its own"),
        (asyncio.CancelledError(), StopReason.ENVIRONMENT_ERROR, "it: CancelledError: it cancelled itself"),
        (StopIteration(1), StopReason.ENVIRONMENT_ERROR, "it: RuntimeError: coroutine raised StopIteration"),
        (ContextOverflow("too long"), StopReason.CONTEXT_OVERFLOW, "too long"),
        (EndEpisode(StopReason.SAMPLER_ERROR, "further in"), StopReason.SAMPLER_ERROR, "further in"),
    ],
)
def test_whatever_is_raised_ends_the_episode_by_name(error: BaseException, stop: StopReason, detail: str) -> None:
    async def work() -> NoReturn:
        await asyncio.sleep(0)
        raise error

    end = ended(work, seconds=60)
    assert (end.stop, end.detail.partition(" (tests/")[0]) == (stop, detail)


def test_late_work_is_cancelled_where_it_waits() -> None:
    async def waits() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(20)

    async def in_a_thread() -> None:
        await call_method(time.sleep, 0.5)

    line = waits.__code__.co_firstlineno + 2
    message = "it: no result within 0.02 seconds (rollout.limits.turn_seconds)"
    assert ended(waits, seconds=0.02).detail == f"{message} (tests/test_boundary.py:{line})"
    assert ended(in_a_thread, seconds=0.02).detail.startswith(message)


@pytest.mark.parametrize("pause", [0, 0.02])  # before the work's first step, and in the middle of it
def test_a_cancellation_of_the_episode_reaches_the_work_and_passes_through(pause: float) -> None:
    seen: list[str] = []

    async def patient() -> None:
        seen.append("started")
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def run() -> bool:
        async def inside() -> None:
            async with Boundary("it", seconds=20):
                await patient()

        task = asyncio.create_task(inside())
        await asyncio.sleep(pause)
        task.cancel()
        await asyncio.wait({task})
        await asyncio.sleep(0)
        return task.cancelled()

    assert asyncio.run(run())
    assert seen in ([], ["started", "cancelled"])
    assert pause == 0 or seen


def test_ctrl_c_is_not_the_plugins() -> None:
    async def interrupted() -> None:
        async with Boundary("it", seconds=20):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(20)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())


# --- messages of others -----------------------------------------------------------------------------------------------


def test_a_list_of_messages_is_taken_as_a_tuple() -> None:
    message = Message(role="user", content="hi")
    assert checked_messages([message], "start()") == (message,)


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (None, r"start\(\) returned None, wanted a tuple of messages"),
        ("hi", r"start\(\) returned 'hi', wanted a tuple of messages"),
        (["hi"], r"start\(\) returned 'hi' among its messages, wanted a Message whose content is text"),
        ([{"role": "user", "content": "hi"}], "wanted a Message whose content is text"),
        ([Message(role="user", content=None)], "wanted a Message whose content is text"),  # type: ignore[arg-type]  # wrong on purpose
        ([Message(role="human", content="hi")], "role 'human', known roles: system, user, assistant, tool"),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_what_is_no_message_is_refused(found: object, complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        checked_messages(found, "start()")


# --- faulty environments ----------------------------------------------------------------------------------------------


async def _waits() -> Step:
    await asyncio.sleep(20)
    return Step()


async def _raises(error: BaseException) -> Step:
    raise error


async def _gives(step: Any) -> Step:
    found: Step = step
    return found


FAULTS: Mapping[str, tuple[Callable[[], Awaitable[Step]], str]] = {
    "none": (lambda: _gives(None), "TypeError: step() returned None, wanted a Step"),
    "text": (lambda: _gives(Step(observations="seen")), "step() returned 'seen', wanted a tuple of messages"),  # type: ignore[arg-type]  # wrong on purpose
    "number": (lambda: _gives(Step(done=True, answer=5)), "the answer 5, wanted text or None"),  # type: ignore[arg-type]  # wrong on purpose
    "answer": (lambda: _gives(Step(answer="4")), "a Step has the answer '4' without done=True"),
    "outcome": (lambda: _gives(Step(outcome=1.0)), "a Step has the outcome 1.0 without done=True"),
    "nan": (lambda: _gives(Step(turn_rewards={"r": math.nan})), "wanted finite numbers"),
    "large": (lambda: _gives(Step(turn_rewards={"r": 1e308})), "magnitude 1e+100 at most"),
    "no rewards": (lambda: _gives(Step(turn_rewards=None)), "wanted numbers by name"),  # type: ignore[arg-type]  # wrong on purpose
    "a text": (lambda: _gives(Step(turn_rewards={"r": "a"})), "{'r': 'a'}, wanted numbers by name"),  # type: ignore[dict-item]  # wrong on purpose
    "exit": (lambda: _raises(SystemExit(0)), "SystemExit: 0"),
    "sys.exit": (lambda: sys.exit(3), "SystemExit: 3"),
    "cancels": (lambda: _raises(asyncio.CancelledError()), "CancelledError: it cancelled itself"),
    "waits": (_waits, "no result within 0.3 seconds (rollout.limits.turn_seconds)"),
    "synchronous": (lambda: Step(), "TypeError: object Step can't be used in 'await'"),  # type: ignore[arg-type, return-value]  # wrong on purpose
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_environment_costs_its_own_episode(fault: str) -> None:
    act, complaint = FAULTS[fault]

    class Faulty(Counting):
        async def step(self, reply: Message) -> Step:
            return await act() if self.problem.question == "fault" else await super().step(reply)

    failed, fine = roll(engine(agent(counting), turn_seconds=0.3), Faulty)
    assert (failed.stop, len(failed.turns), failed.turns[0].observations) == (StopReason.ENVIRONMENT_ERROR, 1, ())
    assert failed.detail.startswith("the environment: ")
    assert complaint in failed.detail
    assert (fine.stop, len(fine.turns)) == (StopReason.ANSWERED, 6)
    assert codec.dump_line(failed)


def test_half_an_emoji_in_an_observation_becomes_text_that_can_be_tokenised_and_saved() -> None:
    class Halved(Counting):
        async def step(self, reply: Message) -> Step:
            step = await super().step(reply)
            return replace(step, observations=tuple(replace(m, content=f"\ud83d {m.text}") for m in step.observations))

    halved, _ = roll(engine(agent(counting)), Halved)
    assert (halved.stop, halved.turns[0].observations[0].text) == (StopReason.ANSWERED, "? seen 1")
    picture = MediaPart.of(b"1", "image/png")
    assert Message(role="user", content=(TextPart(text="\ud83d"), picture)).parts == (TextPart(text="?"), picture)


def test_turn_rewards_are_stored_as_plain_floats() -> None:
    class Paying(Counting):
        async def step(self, reply: Message) -> Step:
            return Step(done=True, answer="1", turn_rewards={"one": 1, "yes": True})

    _, one = roll(engine(agent(counting)), Paying)
    assert [type(value) for value in one.turns[0].turn_rewards.values()] == [float, float]


@pytest.mark.parametrize(
    ("act", "complaint"),
    [
        (lambda: _gives(None), "TypeError: start() returned None, wanted a tuple of messages"),
        (lambda: _gives(()), "TypeError: start() returned no message, wanted at least the question"),
        (lambda: _raises(SystemExit(1)), "SystemExit: 1"),
        (_waits, "no result within 0.3 seconds"),
    ],
)
def test_an_environment_that_does_not_start_costs_its_own_episode(act: Callable[[], Any], complaint: str) -> None:
    class Faulty(Counting):
        async def start(self) -> tuple[Message, ...]:
            found: tuple[Message, ...] = await act() if self.problem.question == "fault" else await super().start()
            return found

    failed, fine = roll(engine(agent(counting), turn_seconds=0.3), Faulty)
    assert (failed.stop, failed.turns) == (StopReason.ENVIRONMENT_ERROR, ())
    assert failed.detail.startswith("starting the environment: ")
    assert complaint in failed.detail
    assert fine.stop is StopReason.ANSWERED


# --- faulty condensers and samplers -----------------------------------------------------------------------------------


@dataclass
class FaultyCondenser(Condenser):
    """Misbehaves, whatever it is asked."""

    act: Callable[[], Awaitable[Any]]

    async def condense(self, history: History, budget: Budget) -> Condensed:
        found: Condensed = await self.act()
        return found


@pytest.mark.parametrize(
    ("act", "complaint"),
    [
        (lambda: _gives(None), "TypeError: condense() returned None, wanted a Condensed"),
        (
            lambda: _gives(Condensed(units=(Message(role="user", content="go"),))),  # type: ignore[arg-type]  # wrong on purpose
            "among its units, wanted those of history.units",
        ),
        (lambda: _raises(SystemExit(0)), "SystemExit: 0"),
        (lambda: _raises(asyncio.CancelledError()), "CancelledError: it cancelled itself"),
        (_waits, "no result within 0.3 seconds"),
    ],
)
def test_a_faulty_condenser_costs_its_own_episodes(act: Callable[[], Any], complaint: str) -> None:
    for one in roll(engine(agent(counting), condenser=FaultyCondenser(act), turn_seconds=0.3)):
        assert (one.stop, len(one.turns)) == (StopReason.ENVIRONMENT_ERROR, 1)
        assert one.detail.startswith("the condenser 'chosen': ")
        assert complaint in one.detail


@dataclass
class FaultySampler:
    """Misbehaves, whatever it is asked."""

    act: Callable[[], Awaitable[Any]]

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        found: Generation = await self.act()
        return found

    def update(self, named_tensors: NamedTensors, version: int) -> None:
        raise NotImplementedError

    @property
    def version(self) -> int:
        return 0

    def close(self) -> None:
        raise NotImplementedError


class Versionless(FaultySampler):
    """Does not know its version."""

    @property
    def version(self) -> int:
        raise LookupError("no version")


@pytest.mark.parametrize(
    ("sampler", "complaint"),
    [
        (FaultySampler(lambda: _gives(said("hello"))), "wanted a Generation"),
        (
            FaultySampler(lambda: _gives(Generation(token_ids=(-1,), logprobs=(0.0,), finish=FinishReason.STOP))),
            "ValueError: sample() returned the token id -1, wanted ids of the tokenizer",
        ),
        (FaultySampler(lambda: _raises(SystemExit(0))), "SystemExit: 0"),
        (FaultySampler(lambda: _raises(asyncio.CancelledError())), "CancelledError: it cancelled itself"),
        (FaultySampler(_waits), "no result within 0.3 seconds"),
        (Versionless(lambda: _gives(None)), "LookupError: no version"),
    ],
)
def test_a_faulty_sampler_costs_its_own_episodes(sampler: FaultySampler, complaint: str) -> None:
    for one in roll(engine(sampler, turn_seconds=0.3)):
        assert (one.stop, one.turns) == (StopReason.SAMPLER_ERROR, ())
        assert one.detail.startswith("the sampler: ")
        assert complaint in one.detail
