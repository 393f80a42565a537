"""Tools that belong to an episode: offered, called with its history, counted as every tool; closed however it ends."""

import asyncio
import gc
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from builders import add_trajectory, scored
from command import ROOT
from formats import TOOL_FORMATS
from talk import CHATML, add, agent, all_tasks_end, engine, play_one, problem
from waiting import eventually

from condensegrpo.assembly.build import build
from condensegrpo.assembly.held_out import check_disjoint
from condensegrpo.condensers.whole_units import LastK
from condensegrpo.config.load import load_config
from condensegrpo.core.messages import History, Message
from condensegrpo.core.plugins import load_plugin
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.protocols.tool import EnvironmentTool, ToolResult
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.settings import ToolLimits
from condensegrpo.episodes.toolcalls import Toolbox
from condensegrpo.rewards.outcome import EnvironmentOutcome
from condensegrpo.storage.trajectories import Provenance, read_trajectories
from condensegrpo.studies.tasks.guess import Guess
from condensegrpo.studies.tasks.notebook import Notebook

WITH_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}" + CHATML
NUMBER = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}


class Counter:
    """Counts up by a tool; 3 ends the episode. What it does besides is chosen by the question of the problem."""

    def __init__(self, problem: Problem, closed: list[str]) -> None:
        self.problem, self.closed = problem, closed
        self.count = 0
        self.units: list[int] = []
        self.read: tuple[str, ...] = ()

    def read_history(self, history: History) -> None:
        self.read = tuple(message.text for unit in history.units for message in unit.messages)

    async def start(self) -> tuple[Message, ...]:
        if self.problem.question == "start raises":
            raise OSError("no port is free")
        return (Message(role="user", content=self.problem.question),)

    def tools(self) -> Sequence[EnvironmentTool]:
        name = "add" if self.problem.question == "same name" else "up"
        return [EnvironmentTool(name=name, description="Counts up.", parameters=NUMBER, call=self.up)]

    async def up(self, arguments: Mapping[str, Any], history: History) -> ToolResult | str:
        self.units.append(len(history.units))
        if self.problem.question == "hangs":
            await asyncio.sleep(60)
        if self.problem.question == "tool raises":
            raise ValueError("cannot count")
        if self.problem.question == "forgets done":
            return ToolResult(text="there", outcome=1.0)
        self.count += int(arguments["by"])
        if self.count < 3:
            return ToolResult(text=f"at {self.count}", turn_rewards={"progress": 0.25})
        return ToolResult(text="there", done=True, outcome=0.5, turn_rewards={"progress": 0.5})

    async def step(self, reply: Message) -> Step:
        if self.problem.question == "step raises":
            raise RuntimeError("broken")
        return Step(done=True, answer=reply.content, outcome=0.25)

    async def close(self) -> None:
        self.closed.append(self.problem.id)
        if self.problem.question == "close raises":
            raise OSError("already gone")


def call(name: str, **arguments: object) -> str:
    return f"<tool>{json.dumps({'name': name, 'args': arguments})}</tool>"


def play(question: str, replies: Sequence[str], closed: list[str], **options: Any) -> tuple[Trajectory, Counter]:
    """An episode in which the nth turn says the nth reply."""
    environments: list[Counter] = []

    def environment(asked: Problem) -> Counter:
        environments.append(Counter(asked, closed))
        return environments[-1]

    left = iter(replies)
    parts = engine(agent(lambda prompt: next(left)), **{"tools": {"add": add}, **options})
    return asyncio.run(play_one(parts, problem(0, question), environment)), environments[-1]


def test_a_tool_of_an_environment_need_not_be_asynchronous() -> None:
    class Plain(Counter):
        def tools(self) -> Sequence[EnvironmentTool]:
            def call(arguments: Any, history: object) -> Any:
                return f"at {arguments['by']}"

            return [EnvironmentTool(name="up", description="Counts up.", parameters=NUMBER, call=call)]

    replies = iter([call("up", by=1), "one"])
    parts = engine(agent(lambda prompt: next(replies)), tools={"add": add})
    first = asyncio.run(play_one(parts, problem(), lambda asked: Plain(asked, []))).turns[0]
    assert (first.observations[0].content, first.tool_successes) == ("<result>at 1</result>", 1)


def test_a_result_with_an_outcome_that_ends_nothing_is_an_error() -> None:
    failed, _ = play("forgets done", [call("up", by=1)], [])
    assert failed.stop is StopReason.ENVIRONMENT_ERROR
    assert "a Step has the outcome 1.0 without done=True" in failed.detail


def test_an_environment_reads_the_turns_that_its_tools_answered_also_those_that_were_condensed() -> None:
    last = LastK(keep_first=0, keep_last=1)
    said = [call("up", by=1), "<tool>up</tool>", "two"]
    trajectory, environment = play("count", said, [], condenser=last)
    assert trajectory.turns[2].condensation is not None
    reply, result, malformed, fault = environment.read
    assert (reply, result, malformed) == (said[0], "<result>at 1</result>", said[1])
    assert fault.startswith("<result>Error: a tool call cannot be read")


def test_a_tool_of_the_environment_keeps_a_state_sees_the_history_and_ends_the_episode(tmp_path: Path) -> None:
    closed: list[str] = []
    trajectory, environment = play("count", [call("up", by=2), call("add", a=1, b=1), call("up", by=1)], closed)
    assert [turn.observations[0].content for turn in trajectory.turns] == [
        "<result>at 2</result>",
        "<result>2</result>",
        "<result>there</result>",
    ]
    assert (trajectory.stop, trajectory.answer, trajectory.outcome) == (StopReason.FINISHED, None, 0.5)
    assert [dict(turn.turn_rewards) for turn in trajectory.turns] == [{"progress": 0.25}, {}, {"progress": 0.5}]
    assert [(turn.tool_attempts, turn.tool_successes) for turn in trajectory.turns] == [(1, 1)] * 3
    assert environment.units == [0, 2]  # units of the history before each of its calls
    assert closed == ["p0"]
    system = trajectory.turns[0].context[0]
    assert system.role == "system"
    assert '"name": "add"' in system.content
    assert '"name": "up", "description": "Counts up."' in system.content
    result = EnvironmentOutcome()(trajectory, problem())
    assert (result.total, result.correct, result.format_valid) == (0.5, 0.0, True)
    file = tmp_path / "step_000001.parquet"
    known = Provenance(
        evaluation=None, step=1, model="m", condenser="full", max_context_tokens=64, temperature=1.0, seed=0
    )
    add_trajectory(file, scored(trajectory, 0.5), known)
    (read,) = read_trajectories(file)
    assert (read.trajectory.stop, read.trajectory.outcome) == (StopReason.FINISHED, 0.5)


def test_the_environment_may_judge_an_answer() -> None:
    trajectory, _ = play("count", ["done"], [])
    assert (trajectory.stop, trajectory.answer, trajectory.outcome) == (StopReason.ANSWERED, "done", 0.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Error: up: missing a required argument: 'by'. It is called as up(by)"),
        ({"by": 1, "to": 2}, "Error: up: got an unexpected keyword argument 'to'. It is called as up(by)"),
    ],
)
def test_arguments_that_do_not_fit_are_an_observation(arguments: dict[str, object], message: str) -> None:
    trajectory, _ = play("count", [call("up", **arguments), "done"], [])
    assert trajectory.turns[0].observations[0].content == f"<result>{message}</result>"
    assert (trajectory.turns[0].tool_attempts, trajectory.turns[0].tool_successes) == (1, 0)


def test_it_has_the_limits_of_every_tool() -> None:
    slow, _ = play("hangs", [call("up", by=1), "done"], [], tool_seconds=0.1)
    assert "up did not finish within 0.1 seconds" in slow.turns[0].observations[0].content
    assert slow.turns[0].tools_abandoned == 1
    raising, _ = play("tool raises", [call("up", by=1), "done"], [])
    assert "Error: up: ValueError: cannot count" in raising.turns[0].observations[0].content
    limited, _ = play("count", [call("up", by=1), call("up", by=1)], [], max_tool_turns=1)
    assert limited.stop is StopReason.TURN_LIMIT


@pytest.mark.parametrize(
    ("question", "detail"),
    [
        ("start raises", "no port is free"),
        ("step raises", "broken"),
        ("close raises", "already gone"),
        ("same name", "tools() offers 'add', which another tool is called too"),
    ],
)
def test_an_environment_that_fails_is_closed_and_says_why(question: str, detail: str) -> None:
    closed: list[str] = []
    trajectory, _ = play(question, ["done"], closed)
    assert trajectory.stop is StopReason.ENVIRONMENT_ERROR
    assert detail in trajectory.detail
    assert closed == ["p0"]


def test_the_chat_template_shows_the_tools_of_the_episode_and_a_renderer_is_made_once() -> None:
    native = Toolbox({"add": add}, format=TOOL_FORMATS["native"], limits=ToolLimits())
    parts = replace(engine(agent(lambda _: "x"), template=WITH_TOOLS), toolbox=native)
    parts = replace(parts, renderer=parts.renderer.with_tools(native.template_schemas))
    offered = Counter(problem(), []).tools()
    first, second = parts.offering(offered), parts.offering(Counter(problem(), []).tools())
    assert first.renderer is second.renderer is not parts.renderer
    text = first.renderer.text(first.renderer.prompt((Message(role="user", content="hi"),)))
    assert '"name": "up"' in text
    assert '"name": "add"' in text
    assert parts.offering(()) is parts


def test_two_hundred_episodes_leave_nothing_behind() -> None:
    """Some end well, some by a limit, a failure or a time-out, and a third is cancelled at any point."""
    questions = ["count", "start raises", "step raises", "tool raises", "hangs", "close raises"]
    closed: list[str] = []
    made: list[str] = []

    def environment(asked: Problem) -> Counter:
        made.append(asked.id)
        return Counter(asked, closed)

    async def episodes() -> None:
        parts = engine(
            agent(lambda prompt: call("up", by=1) if prompt.count("<result>") < 2 else "done"), tool_seconds=0.05
        )
        tasks = [
            asyncio.create_task(play_one(parts, problem(number, questions[number % len(questions)]), environment))
            for number in range(200)
        ]
        for number, task in enumerate(tasks):
            if number % 3 == 0:
                asyncio.get_running_loop().call_later(number / 2000, task.cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, Trajectory | asyncio.CancelledError) for each in results)
        await all_tasks_end()  # tools that were abandoned have been cancelled

    asyncio.run(episodes())  # threads that are kept for later are there now
    closed.clear()
    made.clear()
    threads, files = threading.active_count(), psutil.Process().num_fds()
    asyncio.run(episodes())
    assert sorted(closed) == sorted(made)
    gc.collect()
    assert eventually(lambda: threading.active_count() <= threads)
    assert psutil.Process().num_fds() <= files


def test_an_environment_that_is_being_closed_is_closed_to_the_end_when_the_episode_is_cancelled() -> None:
    """Once while it is closed; and twice at once, the second time before the first step of closing."""

    class Slow(Counter):
        def __init__(self, asked: Problem) -> None:
            super().__init__(asked, [])
            self.events: list[str] = []
            self.go_on = asyncio.Event()

        async def close(self) -> None:
            self.events.append("begins")
            await self.go_on.wait()
            self.events.append("ends")

    async def cancelled(question: str, begun: Callable[[Slow], object], times: int) -> None:
        slow = Slow(problem(0, question))
        parts = engine(agent(lambda _: call("up", by=1) if question == "hangs" else "done"))
        task = asyncio.create_task(play_one(parts, slow.problem, lambda _: slow))
        while not begun(slow):
            await asyncio.sleep(0)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert slow.events == ["begins", "ends"]

    asyncio.run(cancelled("count", lambda slow: slow.events, times=1))
    asyncio.run(cancelled("hangs", lambda slow: slow.units, times=4))


def test_the_built_in_examples_are_solved_with_their_tools() -> None:
    for number in ("37", "100"):
        task = Guess(largest=100)
        asked = next(each for each in (*task.problems("train"), *task.problems("eval")) if each.answer == number)
        trajectory = asyncio.run(_solved(asked, task.environment, _halving(100)))
        assert (trajectory.stop, trajectory.outcome) == (StopReason.FINISHED, 1.0)
    book = Notebook(facts=2, eval_problems=3)
    asked = book.problems("eval")[0]
    trajectory = asyncio.run(_solved(asked, book.environment, _note_taker))
    assert trajectory.answer == asked.answer
    assert not {each.question for each in Guess().problems("train")} - {Guess().problems("eval")[0].question}
    held_out = {"\n".join(each.data["messages"]) for each in book.problems("eval")}
    assert not held_out & {"\n".join(each.data["messages"]) for each in book.problems("train")[:200]}


async def _solved(asked: Problem, environment: Any, reply: Any) -> Trajectory:
    return await play_one(engine(agent(reply), max_turns=20, max_context_tokens=8000), asked, environment)


def _halving(largest: int) -> Any:
    def reply(prompt: str) -> str:
        low, high, guess = 1, largest, 0
        for word in re.findall(r"<result>(\w+)</result>", prompt.partition("Which number")[2]):
            guess = (low + high) // 2
            low, high = (guess + 1, high) if word == "higher" else (low, guess - 1)
        return call("guess", number=(low + high) // 2)

    return reply


def _note_taker(prompt: str) -> str:
    """Writes each fact, and reads the page that the question is about."""
    newest = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    fact = re.match(r"(\w+)'s (\w+) is number (\d+)\.", newest)
    if fact:
        return call("write", page=fact[1], text=fact[3])
    asked = re.match(r"Which number is (\w+)'s", newest)
    if asked:
        return call("read", page=asked[1])
    number = re.match(r"<result>(\d+)</result>", newest)
    return f"<answer>{number[1]}</answer>" if number else "noted"


def test_the_example_of_the_guide_plays(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "write-a-stateful-tool.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    file = tmp_path / "shelf.py"
    file.write_text(blocks[0], encoding="utf-8")
    task = load_plugin("tasks", f"{file}:Shelf")()
    (tmp_path / "shelf.yaml").write_text(re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)[0], encoding="utf-8")
    check_disjoint(build(load_config(tmp_path / "shelf.yaml", [f"task.name={file}:Shelf"])))
    order = iter(["red", "grey"])
    asked = next(each for each in task.problems("train") if each.answer == "grey")
    trajectory = asyncio.run(_solved(asked, task.environment, lambda _: call("open_box", box=next(order))))
    assert (trajectory.stop, trajectory.outcome) == (StopReason.FINISHED, 0.5)
    assert trajectory.turns[0].turn_rewards == {"search": -0.1}


def test_a_tool_format_of_a_file_reads_calls_and_shows_results(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "write-a-tool-format.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    file = tmp_path / "at_calls.py"
    file.write_text(block, encoding="utf-8")
    built = load_plugin("tool_formats", f"{file}:AtCalls")(result="got")
    parts = engine(agent(lambda prompt: '@add {"a": 2, "b": 3}' if "got" not in prompt else "answer 5"))
    parts = replace(parts, toolbox=Toolbox({"add": add}, format=built))

    class Asks:
        async def start(self) -> tuple[Message, ...]:
            return (Message(role="user", content="2 and 3?"),)

        async def step(self, reply: Message) -> Step:
            return Step(done=True, answer=reply.content)

    trajectory = asyncio.run(play_one(parts, problem(), lambda _: Asks()))  # type: ignore[arg-type]  # inherits nothing
    assert trajectory.turns[0].observations[0].content == "got: 5"
    assert (trajectory.answer, trajectory.turns[0].tool_successes) == ("answer 5", 1)
    assert trajectory.turns[0].context[0].content.endswith("Tools: add")
    (fault,) = built.parse("@add {a}")
    assert "are no JSON" in fault.reason
