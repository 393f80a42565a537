"""The task ``verifiers`` against the real library, in an environment of its own that ``make others`` makes."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from command import ROOT
from scripted_training import train_on_replies
from talk import agent, engine, play_all, results
from waiting import eventually

from condensegrpo.condensers.whole_units import LastK
from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import PluginError
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.settings import CondenseSettings

HOME = Path(sys.prefix) / "others" / "verifiers"
PYTHON = str(HOME / "bin" / "python")
pytestmark = pytest.mark.skipif(not HOME.exists(), reason="verifiers is not installed: make others")
PROGRAM = ROOT / "condensegrpo" / "integrations" / "verifiers_server.py"
PAGE = (ROOT / "docs" / "how-to" / "connect-verifiers.md").read_text(encoding="utf-8")
SHOP = '''
import asyncio, os, sys

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Log(vf.State):
    items: list[str] = []


class Shop(vf.Toolset[vf.ToolsetConfig, Log]):
    async def setup_task(self, task: Data) -> None:
        self.question = task.prompt

    @vf.tool
    async def price(self, item: str, seconds: float = 0.0) -> int:
        """What an item costs."""
        await asyncio.sleep(seconds)
        self.state.items.append(item)
        return {"lamp": 25, "chair": 40}[item]

    @vf.tool
    def lines(self) -> int:
        """Of the question."""
        return len(self.question.splitlines())

    @vf.tool
    def latin(self, reward: str) -> str:
        """A text of bytes that were no UTF-8."""
        return "caf\\udce9"

    @vf.tool
    def die(self) -> str:
        """Ends the process."""
        print("out of paper", file=sys.stderr, flush=True)
        os._exit(3)


class Bell(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    async def setup(self) -> None:
        self.calls = 0

    @vf.tool
    def ring(self) -> int:
        """How often it was called, by anyone."""
        self.calls += 1
        return self.calls


class Question(vf.Task[Data, Log]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Shop(vf.ToolsetConfig())]

    async def setup(self, trace: vf.Trace) -> None:
        trace.info["broken"] = self.data.prompt == "shop_lines"

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return vf.verify_boxed_math_answer(trace.last_reply, self.data.answer)

    @vf.reward(weight=0.01)
    async def seen(self, trace: vf.Trace) -> float:
        return sum(int(message.content) for message in trace.tool_messages if message.content.isdigit())

    @vf.reward(weight=10)
    async def said(self, trace: vf.Trace) -> dict[str, float]:
        print("rewarded", end="")
        calls = [call.id for message in trace.assistant_messages for call in message.tool_calls or []]
        texts = "".join(message.content or "" for message in trace.assistant_messages)
        return {"turns": trace.num_turns, "calls": len(set(calls)), "letters": len(texts)}

    @vf.reward
    async def odd(self, trace: vf.Trace) -> float:
        if "exit" in self.data.prompt:
            raise SystemExit(4)
        if "error" in self.data.prompt:
            raise ValueError("caf\\udce9")
        return float("nan" if "nan" in self.data.prompt else 0)

    @vf.reward(weight=1000)
    async def asked(self, trace: vf.Trace) -> float:
        if trace.info["broken"]:
            raise KeyError("no such shelf")
        return len(trace.state.items)


class Config(vf.TasksetConfig):
    questions: list[str]
    shared: bool = False


class Questions(vf.Taskset[Question, Config]):
    def load(self) -> list[Question]:
        system = "You sell."
        return [Question(Data(prompt=text, system_prompt=system, answer="25")) for text in self.config.questions]

    @classmethod
    def toolsets(cls, config: Config) -> list[vf.Toolset]:
        return [Bell(vf.SharedToolsetConfig())] if config.shared else []


if __name__ == "__main__":
    Shop.run()
'''
OTHERS = '''
import socket

import verifiers.v1 as vf


class Plain(vf.Taskset):
    data = {"prompt": "What?"}
    task = vf.Task

    def load(self):
        return [self.task(vf.TaskData(**self.data))]


class NoPrompt(Plain):
    data = {}


class Picture(Plain):
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    data = {"prompt": [{"role": "user", "content": [picture]}]}


class InABox(Plain):
    data = {"prompt": "What?", "image": "debian", "artifacts": [{"source": "/out"}]}

    class task(vf.Task):
        NEEDS_CONTAINER = True

        async def setup(self, trace, runtime): ...

        @vf.reward
        async def tests(self, runtime): ...

        @vf.stop
        def over(self, trace: vf.Trace) -> bool: ...


class Rings(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "bell"

    @vf.tool
    def ring(self) -> str:
        """Rings."""


class Sockets(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def connect(self, to: socket.socket) -> str:
        """Connects."""


class OneName(Plain):
    class task(vf.Task):
        @classmethod
        def toolsets(cls, config):
            return [Rings(vf.ToolsetConfig()), Rings(vf.ToolsetConfig(runtime=cls.runtime))]

        runtime = vf.SubprocessConfig()


class InDocker(OneName):
    class task(OneName.task):
        runtime = vf.DockerConfig()


class NoSchema(Plain):
    class task(vf.Task):
        @classmethod
        def toolsets(cls, config):
            return [Sockets(vf.ToolsetConfig())]


class Endless(Plain):
    INFINITE = True


class Empty(Plain):
    def load(self):
        return []


'''
TALK = """
import verifiers.v1 as vf
from others import Plain

__all__ = ["Conversation", "Plain"]


class Conversation(vf.Env): ...
"""
REFUSED = {
    "Plain": "",
    "talk.py:Plain": "its own environment Conversation (a simulated user, several agents or another program)",
    "NoPrompt": "a user who opens the conversation (task 0 has no prompt)",
    "Picture": "pictures (task 0)",
    "InABox": "a container (NEEDS_CONTAINER); the stop or intercept function over; a sandbox (the parameter runtime of "
    "InABox.task.setup); a sandbox (the parameter runtime of InABox.task.tests); the image of task 0; the artifacts of "
    "task 0",
    "OneName": "two toolsets have a tool 'bell_ring': give one of them another TOOL_PREFIX",
    "InDocker": "a sandbox (of the toolset Rings)",
    "NoSchema": "socket",
    "Endless": "the taskset has tasks without end: set task.options.max_examples",
    "Empty": "the taskset has no task",
    "Nothing": "is None, wanted a class that inherits verifiers.v1.Taskset",
}
HALF = "\\boxed{\\frac{50}{2}}"  # 25 for math-verify, which needs the main thread
LONG = [f'shop_price {{"item": "{item}"}}' for item in ("lamp", "sofa", "chair", "lamp")] + ["shop_lines"]
LATIN = {reward: f'shop_latin {{"reward": "{reward}"}}' for reward in ("nan", "error", "exit")}
WAITING = [f'shop_price {{"item": "lamp", "seconds": 0.{number:02}}}\nring' for number in range(34)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taskset")
    (folder / "shop.py").write_text(SHOP, encoding="utf-8")
    (folder / "others.py").write_text(OTHERS, encoding="utf-8")
    (folder / "talk.py").write_text(TALK, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def shop(folder: Path) -> Iterator[Any]:
    """One process for all tests. A question is what the policy calls, a line each."""
    questions = ["\n".join(LONG), "shop_lines", "shop_die", *LATIN.values(), *WAITING]
    config = {"questions": questions, "shared": True}
    task = taskset(f"{folder / 'shop.py'}:Questions", config=config, eval_config={"questions": [*WAITING[:2], "ring"]})
    yield task
    task._end()
    assert eventually(lambda: not [each for each in psutil.process_iter(["cmdline", "ppid"]) if is_program(each)])


def is_program(process: psutil.Process) -> bool:
    return process.info["ppid"] == os.getpid() and str(PROGRAM) in (process.info["cmdline"] or ())


def taskset(name: str, **options: Any) -> Any:
    return build_plugin("tasks", "verifiers", {"taskset": name, "python": PYTHON, "tool_format": "tagged", **options})


def located(folder: Path, name: str) -> str:
    return f"{folder}/{name}" if ":" in name else f"{folder}/others.py:{name}"


def play(task: Any, questions: Sequence[str], **options: Any) -> list[Trajectory]:
    """All of some training questions at the same time."""
    said = Counter[str]()

    def reply(prompt: str) -> str:
        question = prompt.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        calls = question.splitlines()
        said[question] += 1
        if said[question] > len(calls):
            return f"<think>half of 50</think>\n{HALF}"
        name, _, arguments = calls[said[question] - 1].partition(" ")
        return f'Well. <tool>{{"name": "{name}", "args": {arguments or "{}"}}}</tool>'

    limits = {"max_turns": 9, "max_context_tokens": 20_000, "max_output_tokens": 200, "tool_seconds": 30}
    parts = engine(agent(reply), **{**limits, **options})
    problems = [problem for problem in task.problems("train") if problem.question in questions]

    return play_all(parts, problems, task.environment)


def test_tasks_are_problems_that_the_splits_do_not_share(shop: Any) -> None:
    train, held_out = shop.problems("train"), shop.problems("eval")
    assert (len(train), len(held_out), shop.left_out) == (38, 3, 2)
    assert (train[1].question, train[1].answer) == ("shop_lines", "25")
    assert not {problem.question for problem in train} & {problem.question for problem in held_out}


@pytest.fixture(scope="module")
def originals(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What is refused of other tasksets and, with LONG_TESTS, what verifiers' own runner makes of the first question.

    Its runner starts two more processes that import verifiers; the test knows the reward by hand.
    """
    calls = [line.partition(" ") for line in LONG]
    replies: list[dict[str, Any]] = [
        {
            "content": "Well.",
            "tool_calls": [
                {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": given or "{}"}}
            ],
        }
        for number, (name, _, given) in enumerate(calls)
    ]
    config = {"questions": ["\n".join(LONG)]}
    plan = {"module": "shop", "class": "Questions", "config": config, "replies": [*replies, {"content": HALF}]}
    others: dict[str, dict[str, Any]] = {located(folder, name): {} for name in REFUSED}
    others |= {"no-such-taskset": {}, f"{folder / 'shop.py'}:Questions": {"x": 1}}
    done = subprocess.run(
        [
            PYTHON,
            str(Path(__file__).with_name("verifiers_runner.py")),
            str(PROGRAM),
            json.dumps(plan if "LONG_TESTS" in os.environ else None),
            json.dumps(others),
        ],
        env={**os.environ, "HOME": str(tmp_path_factory.mktemp("home")), "NONE": "none", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("keep_last", "meter"), [(9, "none"), (1, "turns")])
def test_the_outcome_is_the_reward_that_verifiers_gives_the_whole_conversation(
    shop: Any, originals: Any, keep_last: int, meter: Any
) -> None:
    """Also where the policy saw only a part of it, with a meter. Of what a tool raised the state keeps nothing."""
    condenser, trigger = LastK(keep_first=0, keep_last=keep_last), CondenseSettings(meter=meter)
    (trajectory,) = play(shop, ["\n".join(LONG)], condenser=condenser, trigger=trigger)
    assert any(turn.condensation for turn in trajectory.turns) == (keep_last == 1)
    numbers = [text for text in results(trajectory) if text.isdigit()]
    assert numbers == ["25", "40", "25", "5"]
    assert "Error executing tool price" in results(trajectory)[1]
    assert (trajectory.stop, trajectory.answer) == (StopReason.ANSWERED, HALF)
    letters = 5 * len("Well.") + len(HALF)
    assert trajectory.outcome == pytest.approx(1 + 0.01 * 95 + 10 * (6 + 5 + letters) + 1000 * 3)
    if trace := originals["trace"]:
        assert trajectory.outcome == trace["reward"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(originals: Any, folder: Path, name: str) -> None:
    refused = originals["refused"][located(folder, name)]
    assert REFUSED[name] in refused
    assert bool(refused) == (name != "Plain")


def test_a_taskset_that_is_not_there_and_a_wrong_key_are_refused(originals: Any, folder: Path) -> None:
    refused = originals["refused"]
    assert "taskset 'no-such-taskset' not found" in refused["no-such-taskset"]
    assert "questions" in refused[f"{folder / 'shop.py'}:Questions"]
    with pytest.raises(
        PluginError, match=r"(?s)setting up the task verifiers with nothing\.py:Nothing: .*No module named"
    ):
        taskset("nothing.py:Nothing", python=sys.executable)
    with pytest.raises(PluginError, match="names an environment variable that is not set: 'NO_SUCH'"):
        taskset("nothing.py:Nothing", variables=["NO_SUCH"])


def test_a_reward_that_raises_ends_its_trajectory_alone(shop: Any) -> None:
    broken, other = play(shop, ["shop_lines", WAITING[2]])
    assert (broken.stop, broken.outcome, len(broken.turns)) == (StopReason.ENVIRONMENT_ERROR, None, 2)
    assert re.search(
        r"the rewards of the taskset: TaskError: .*KeyError: 'no such shelf' \(shop\.py:\d+\)", broken.detail
    )
    assert other.stop is StopReason.ANSWERED, other.detail


@pytest.mark.parametrize(("reward", "fault"), [("nan", "has the outcome nan"), ("error", "ValueError: caf")])
def test_a_reward_without_a_number_and_a_text_that_is_no_utf_8_end_no_other_trajectory(
    shop: Any, reward: str, fault: str
) -> None:
    odd, other = play(shop, [LATIN[reward], WAITING[2]])
    assert results(odd) == ["caf?"]
    assert odd.stop is StopReason.ENVIRONMENT_ERROR
    assert fault in odd.detail
    assert other.stop is StopReason.ANSWERED, other.detail


def test_thirty_two_episodes_share_the_process_and_leave_nothing(shop: Any) -> None:
    files = psutil.Process().num_fds()
    trajectories = play(shop, WAITING)
    assert {trajectory.stop for trajectory in trajectories} == {StopReason.ANSWERED}
    rings = sorted(int(results(trajectory)[1]) for trajectory in trajectories)
    assert rings == list(range(rings[0], rings[0] + 32))
    assert {results(trajectory)[0] for trajectory in trajectories} == {"25"}
    assert len({trajectory.outcome for trajectory in trajectories}) > 1
    assert eventually(lambda: psutil.Process().num_fds() <= files)


def test_a_process_that_dies_ends_the_trajectories_that_use_it(shop: Any) -> None:
    (died,) = play(shop, ["shop_die"])
    assert died.stop is StopReason.ENVIRONMENT_ERROR
    assert re.search(r"of the taskset .*shop\.py:Questions ended with exit code 3: .*out of paper", died.detail)
    (left,) = play(shop, [LATIN["exit"]])
    assert left.stop is StopReason.ENVIRONMENT_ERROR
    assert re.search(r"of the taskset .*shop\.py:Questions (ended with exit code 4|closed its stdout): ", left.detail)


def test_the_example_of_the_page_trains_and_evaluates(tmp_path: Path) -> None:
    """The replies are scripted: the answer is right for one of the two questions."""
    blocks = re.findall(r"```\w+\n(.*?)```", PAGE, re.DOTALL)
    for name, block in zip(("prices.py", "prices.yaml"), blocks, strict=True):
        (tmp_path / name).write_text(block)
    replies = ['<tool>{"name": "shop_price", "args": {"item": "lamp"}}</tool>', "25"]
    trained = train_on_replies(tmp_path, "prices", replies, f"task.options.python={PYTHON}")
    assert [(line["reward"], line["tool_calls_valid"]) for line in trained] == [(0.75, 1.0)] * 2
