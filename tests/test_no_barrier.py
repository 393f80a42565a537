"""No per-turn barrier: a batch takes as long as its longest trajectory, whatever tools do meanwhile.

Latencies are simulated on a clock that jumps from timer to timer, so that walls are exact and no machine is too slow.
"""

import asyncio
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from talk import Counting, agent, engine, ignore, last_count, problem, said, shown, simulated

from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.group import problem_groups, rollout_groups
from condensegrpo.samplers.scripted import ScriptedSampler

REPLIES = 4  # of an episode below, the answer included
NEVER = 1e6  # seconds; nothing in these tests takes as long


class Slow(Counting):
    """Takes so many seconds to answer each reply as its question says: ``3 0.5 hang crash``."""

    async def step(self, reply: Message) -> Step:
        pace = self.problem.question.split()[len(self.replies)]
        if pace == "hang":
            await asyncio.Event().wait()
        if pace == "crash":
            raise ZeroDivisionError("crashed")
        await asyncio.sleep(float(pace))
        return await super().step(reply)


def replies(prompt: str) -> str:
    """Three greetings and an answer."""
    count = last_count(prompt)
    return f"answer {count}" if count == REPLIES - 1 else f"hello {count}"


def walls(questions: Sequence[str], *, sampling: float, limit: float = NEVER) -> tuple[list[Trajectory], float]:
    """The trajectories of problems with these paces, and the time of the whole batch."""

    async def run() -> tuple[list[Trajectory], float]:
        sampler = ScriptedSampler(lambda ids: said(replies(shown(ids))), seconds=sampling)
        groups = await rollout_groups(
            problem_groups([problem(number, question) for number, question in enumerate(questions)], 7),
            samples=1,
            environment=Slow,
            engine=engine(sampler, turn_seconds=limit),
            run_seed=0,
            step=0,
            on_finish=ignore,
        )
        return [one for group in groups for one in group], asyncio.get_running_loop().time()

    return simulated(run())


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 60), min_size=REPLIES, max_size=REPLIES), min_size=1, max_size=8))
def test_a_batch_takes_as_long_as_its_longest_trajectory(paces: list[list[int]]) -> None:
    found, wall = walls([" ".join(map(str, pace)) for pace in paces], sampling=1.0)
    longest = max(map(sum, paces)) + REPLIES * 1.0
    assert {one.stop for one in found} == {StopReason.ANSWERED}
    assert wall == pytest.approx(longest, rel=1e-6)


def test_with_a_barrier_per_turn_the_same_batch_would_take_far_longer() -> None:
    """Each of four trajectories is slow in another turn: a barrier would wait for every one of them."""
    paces = [[30 if turn == slow else 1 for turn in range(REPLIES)] for slow in range(REPLIES)]
    _, wall = walls([" ".join(map(str, pace)) for pace in paces], sampling=1.0)
    barrier = sum(max(column) for column in zip(*paces, strict=True)) + REPLIES * 1.0
    assert barrier == 124
    assert wall == pytest.approx(37, rel=1e-6)


def test_hung_and_crashed_siblings_cost_only_their_own_time_limit() -> None:
    """Pitfall 29: the group completes in bounded time, and each sibling that failed is marked."""
    found, wall = walls(["1 1 1 1", "1 hang 1 1", "crash 1 1 1", "2 2 2 2"], sampling=0.0, limit=100)
    assert [one.stop for one in found] == [
        StopReason.ANSWERED,
        StopReason.ENVIRONMENT_ERROR,
        StopReason.ENVIRONMENT_ERROR,
        StopReason.ANSWERED,
    ]
    assert [len(one.turns) for one in found] == [4, 2, 1, 4]
    assert wall == pytest.approx(101, rel=1e-6)  # the one that hangs, after a second


def roll(parts: Engine, posed: Sequence[Problem]) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        groups = await rollout_groups(
            problem_groups(posed, 7),
            samples=1,
            environment=Counting,
            engine=parts,
            run_seed=0,
            step=0,
            on_finish=ignore,
        )
        return [one for group in groups for one in group]

    return asyncio.run(run())


def calls(name: str, prompt: str) -> str:
    """One call of a tool without arguments, then an answer with what it gave."""
    newest = prompt.rpartition("<|im_end|>")[0].rpartition("<|im_start|>")[2]
    if "<result>" in newest:
        return "answer " + newest.partition("<result>")[2].partition("</result>")[0].strip()
    return f'<tool>{{"name": "{name}", "args": {{}}}}</tool>'


MANY = 48  # more than the threads of asyncio's own pool: 32 at most


def test_all_blocking_tools_run_at_the_same_time() -> None:
    together = threading.Barrier(MANY)

    def meet() -> str:
        """Blocks until so many are in it at once."""
        together.wait(timeout=240)
        return "met"

    box = engine(agent(lambda prompt: calls("meet", prompt)), tools={"meet": meet})
    found = roll(box, [problem(number) for number in range(MANY)])
    assert [one.answer for one in found] == ["met"] * MANY


def test_hung_tools_do_not_take_the_threads_of_others() -> None:
    """Pitfall 29: those that hang end at their limit, and a tool called afterwards still runs."""
    release = threading.Event()

    def wait() -> str:
        """Hangs."""
        release.wait(60)
        return "late"

    def hello() -> str:
        """Greets."""
        return "hi"

    sampler = agent(lambda prompt: calls("wait" if "stuck" in prompt else "hello", prompt))
    tools = {"wait": wait, "hello": hello}
    stuck = roll(engine(sampler, tools=tools, tool_seconds=0.2), [problem(number, "stuck") for number in range(MANY)])
    fine = roll(engine(sampler, tools=tools), [problem(0, "go")])
    release.set()
    assert {one.stop for one in stuck} == {StopReason.ANSWERED}
    assert all("did not finish within 0.2 seconds" in (one.answer or "") for one in stuck)
    assert [one.answer for one in fine] == ["hi"]
