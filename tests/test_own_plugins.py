"""The package's own plug-ins run on the event loop as they are; what calls code of others runs by parts."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NoReturn

import pytest
from talk import Counting, engine, ignore, problem, said

from condensegrpo.attention.scripted import ScriptedScorer
from condensegrpo.condensers.attention import AttentionCondenser
from condensegrpo.condensers.last_k import LastK
from condensegrpo.condensers.pipeline import Pipeline
from condensegrpo.core.errors import ContextOverflow
from condensegrpo.core.messages import History
from condensegrpo.core.plugin_task import Blocked, plugin_task
from condensegrpo.core.protocols import Budget, Condensed, Stage
from condensegrpo.core.trajectory import Stop, Trajectory
from condensegrpo.rollout.boundary import Ended, guarded, is_own
from condensegrpo.rollout.engine import Engine
from condensegrpo.rollout.episode import run_episode
from condensegrpo.rollout.group import problem_groups, rollout
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.tasks.ledger import Ledger


class Mine(LastK):
    """A condenser of a user: it inherits its code, but may override any of it."""


@pytest.mark.parametrize(
    ("plugin", "own"),
    [
        (LastK(), True),
        (Mine(), False),
        (Pipeline([Stage(name="mine", condenser=LastK())]), True),
        (Pipeline([Stage(name="inner", condenser=Pipeline([Stage(name="mine", condenser=Mine())]))]), False),
        (ScriptedSampler([[1]]), True),
        (ScriptedSampler(lambda _: [1]), False),
        (ScriptedScorer(lambda _: 1.0), False),
        (Ledger().environment, True),
        (Ledger().environment(Ledger().problems("train")[0]), True),
        (len, False),
    ],
)
def test_a_plugin_is_own_with_every_plugin_that_it_calls(plugin: object, own: bool) -> None:
    assert is_own(plugin) is own


def test_a_condenser_is_run_as_its_scorers_are() -> None:
    scorers = {"mine": ScriptedScorer(lambda _: 1.0)}
    parts = engine(ScriptedSampler([[1]]), condenser=AttentionCondenser(scorer="mine"))
    shared = {"sampler": parts.sampler, "renderer": parts.renderer, "toolbox": parts.toolbox, "limits": parts.limits}
    asked = Engine(condenser=parts.condenser, condenser_name="attention", scorers=scorers, **shared)
    unused = Engine(condenser=LastK(), condenser_name="last_k", scorers=scorers, **shared)
    assert (asked.own_condenser, unused.own_condenser) == (False, True)


# --- on the event loop, without tasks and threads -----------------------------------------------------------------


def test_own_plugins_need_neither_tasks_nor_threads() -> None:
    task = Ledger(min_ops=1, max_ops=1)
    replies = [said("<note> 1 </note>"), said("<note> 2 </note>"), said("<answer> 2 </answer>")]
    parts = engine(ScriptedSampler(replies), condenser=Pipeline([Stage(name="last_k", condenser=LastK(keep_last=1))]))
    created: list[object] = []

    def create(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        created.append(work)
        return asyncio.Task(work, loop=loop, **options)

    async def play() -> tuple[Trajectory, int]:
        asyncio.get_running_loop().set_task_factory(create)  # type: ignore[arg-type]
        posed = task.problems("train")[0]
        played = await run_episode(
            posed, environment=task.environment, engine=parts, group_id="0", sample=0, seed=lambda text: text
        )
        return played, len(created)

    threads = set(threading.enumerate())
    played, tasks = asyncio.run(play())
    assert (played.stop, len(played.turns), tasks) == (Stop.ANSWERED, 3, 0)
    assert set(threading.enumerate()) <= threads


# --- failures are those of the trajectory, as for plug-ins of others ----------------------------------------------


def ended(work: Callable[[], Coroutine[Any, Any, Any]], seconds: float | None = None) -> str:
    """The end of a trajectory by own code."""

    async def run() -> str:
        with pytest.raises(Ended) as caught:
            await guarded(work, who="it", stop=Stop.SAMPLER_ERROR, turn_seconds=5, seconds=seconds, own=True)
        return f"{caught.value.stop} {caught.value.detail}"

    return asyncio.run(run())


class Panic(BaseException):
    """As pyo3's PanicException, which a tokenizer raises: no Exception."""


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (KeyError("lost"), "sampler_error it: KeyError: 'lost'"),
        (SystemExit(0), "sampler_error it: SystemExit: 0"),
        (Panic("rust"), "sampler_error it: Panic: rust"),
        (TimeoutError("its own"), "sampler_error it: TimeoutError: its own"),
        (asyncio.CancelledError(), "sampler_error it: CancelledError: it cancelled itself"),
        (ContextOverflow("too long"), "context_overflow too long"),
    ],
)
def test_whatever_own_code_raises_ends_the_trajectory(error: BaseException, detail: str) -> None:
    async def work() -> NoReturn:
        await asyncio.sleep(0)
        raise error

    for seconds in (None, 5.0):
        assert ended(work, seconds).partition(" (tests/")[0] == detail


def test_own_code_has_the_time_limits_of_all_code() -> None:
    late = "sampler_error it: no result within 0.02 seconds (rollout.limits.turn_seconds)"
    assert ended(lambda: asyncio.sleep(20), 0.02) == late


def test_a_cancelled_episode_is_cancelled_inside_own_code_too() -> None:
    async def run() -> bool:
        work = guarded(
            lambda: asyncio.sleep(20), who="it", stop=Stop.SAMPLER_ERROR, turn_seconds=5, seconds=5, own=True
        )
        task = asyncio.create_task(work)
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert asyncio.run(run())


def test_ctrl_c_passes_through_own_code() -> None:
    async def interrupted() -> NoReturn:
        raise KeyboardInterrupt  # as Python does in the main thread

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(guarded(interrupted, who="it", stop=Stop.SAMPLER_ERROR, turn_seconds=5, own=True))


def test_a_part_of_others_that_blocks_takes_no_time_of_own_code() -> None:
    async def blocks() -> None:
        await asyncio.sleep(0.1)
        time.sleep(1.5)

    async def run() -> str:
        blocking = plugin_task(blocks(), name="it", seconds=1.0)
        done = asyncio.sleep(0.5, "done")
        try:
            return await guarded(
                lambda: done, who="own", stop=Stop.SAMPLER_ERROR, turn_seconds=5, seconds=0.6, own=True
            )
        finally:
            await asyncio.wait({blocking})
            assert isinstance(blocking.exception(), Blocked)

    assert asyncio.run(run()) == "done"


# --- composites that call code of others --------------------------------------------------------------------------


class BlocksOnce:
    """A condenser whose first call never lets the event loop go on."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.calls = 0

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        self.calls += 1
        if self.calls == 1:
            self.release.wait(60)
        return Condensed(units=history.units)


def test_a_condenser_of_others_in_a_built_in_pipeline_is_abandoned_when_it_blocks() -> None:
    mine = BlocksOnce()
    script = ScriptedSampler(lambda ids: said("answer 1" if len(ids) > 120 else "go on"))
    pipeline = Pipeline([Stage(name="mine", condenser=mine, over=0.0)])
    groups = asyncio.run(
        rollout(
            problem_groups([problem(0), problem(1)], 0),
            samples=1,
            environment=Counting,
            engine=engine(script, condenser=pipeline, turn_seconds=1.0),
            run_seed=0,
            step=0,
            on_finish=ignore,
        )
    )
    mine.release.set()
    assert [played.stop for (played,) in groups] == [Stop.ENVIRONMENT_ERROR, Stop.ANSWERED]
    assert "it held up the event loop for more than 1 second" in groups[0][0].detail
    assert "(tests/test_own_plugins.py:" in groups[0][0].detail
