"""What the code of a user raises, or that it never returns, is the failure of one trajectory, with file and line."""

import asyncio
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from command import TINY, run, start
from runs import wait_for, wait_for_error
from talk import CHATML, Counting, agent, counting, engine, play_all, problem, said, tokenizer
from tiny import qwen3

from condensegrpo.algorithms.credit import scores_of, split_masked
from condensegrpo.algorithms.settings import DEFAULT_STOPS
from condensegrpo.assembly.build import build
from condensegrpo.assembly.demonstrations import corpus_of, made_turns, verdict_of
from condensegrpo.assembly.preflight import check_model, made_tokenizer
from condensegrpo.config.load import validate
from condensegrpo.core.background_loop import PLUGIN_SECONDS, BackgroundLoop
from condensegrpo.core.condenser import Budget, Condensed, Condenser
from condensegrpo.core.errors import ConfigError, PluginError
from condensegrpo.core.failures import PluginFailure
from condensegrpo.core.messages import History, Message
from condensegrpo.core.observer import Observer
from condensegrpo.core.plugins import load_plugin
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.reward import Reward
from condensegrpo.core.protocols.task import Demonstration, Problem, Task
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.group import problem_groups
from condensegrpo.episodes.player import LocalPlayer
from condensegrpo.episodes.render import Renderer
from condensegrpo.learner.settings import NewModel
from condensegrpo.metrics.trajectories import summarise
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.storage.run_folder import read_metrics
from condensegrpo.storage.trajectories import read_trajectories, write_trajectories
from condensegrpo.training.learn_step import condenser_counts

REWARDS = '''
import re, sys, time

class Moody:
    """Fails at some samples, each in its own way."""

    def __call__(self, trajectory, problem):
        if trajectory.sample == 1:
            return {"brief": 1 / 0}
        if trajectory.sample == 2:
            sys.exit("no judge")
        if trajectory.sample == 3:
            raise KeyboardInterrupt
        if trajectory.sample == 4:
            return "good"
        return {"correct": 1.0}

'''


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    (tmp_path / "moody.py").write_text(REWARDS)
    return tmp_path / "moody.py"


def fine(trajectory: Trajectory, problem: Problem) -> dict[str, float]:
    """A reward that works."""
    return {"fine": 1.0}


def collected(
    reward: Reward, *, samples: int, environment: Callable[[Problem], Any] = Counting, parts: Engine | None = None
) -> tuple[ScoredTrajectory, ...]:
    """One group, rolled out as training does: on a loop of its own. Every reply answers at once."""
    parts = parts or engine(ScriptedSampler(lambda _: said("answer 1")))
    with BackgroundLoop("test", close_seconds=PLUGIN_SECONDS) as loop:
        return loop.run(
            LocalPlayer(environment=environment, engine=parts, reward=reward).play(
                problem_groups([problem()], 0), samples=samples, run_seed=0, step=1, on_scored=lambda one: None
            )
        )


# --- demonstrations ---------------------------------------------------------------------------------------------------

CARELESS = """
class Careless:
    def demonstrations(self, seed):
        yield {"context": ["say 4"]} if seed else None

    def corpus(self):
        yield "say"
        raise KeyError("word")

    def sound(self, context, reply):
        return int(reply) == 4
"""


def test_what_a_task_raises_in_its_demonstrations_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "careless.py"
    file.write_text(CARELESS)
    careless = load_plugin("tasks", f"{file}:Careless")()
    turn = Demonstration(context=(), reply="4")
    calls: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: corpus_of(careless), f"calling corpus of the task Careless: KeyError: 'word' ({file}:8)"),
        (lambda: verdict_of(careless, turn, "four"), "ValueError: invalid literal for int() with base 10: 'four' "),
        (lambda: verdict_of(careless, turn, "four"), f"({file}:11)"),
        (lambda: next(made_turns(careless, 1)), "yielded {'context': ['say 4']}, wanted a Demonstration "),
        (lambda: next(made_turns(careless, 1)), f"({file}:3)"),
    )
    for call, expected in calls:
        with pytest.raises(ConfigError, match=re.escape(expected)):
            call()


def test_a_corpus_alone_makes_a_tokenizer(tmp_path: Path) -> None:
    class Words:
        def corpus(self) -> list[str]:
            return ["say four", "<answer> 4 </answer>"]

    class Letters:
        def corpus(self) -> str:
            return "say four"

    made = made_tokenizer(cast(Task, Words()), NewModel())
    assert made.decode(made.encode("say <answer> 4 </answer> never")) == "say <answer> 4 </answer> [UNK]"
    with pytest.raises(ConfigError, match="corpus of the task Letters: TypeError: returned 'say four', wanted texts"):
        made_tokenizer(cast(Task, Letters()), NewModel())
    with pytest.raises(ConfigError, match=r"task object: a tokenizer needs its corpus\(\)"):
        made_tokenizer(cast(Task, object()), NewModel())


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_a_failing_reward_ends_its_own_trajectory_with_file_and_line(rewards: Path) -> None:
    found = collected(load_plugin("rewards", f"{rewards}:Moody")(), samples=6)
    details = [one.trajectory.detail for one in found]
    assert [one.trajectory.stop for one in found] == [
        StopReason.ANSWERED,
        *[StopReason.REWARD_ERROR] * 4,
        StopReason.ANSWERED,
    ]
    assert details[1] == f"the reward Moody: ZeroDivisionError: division by zero ({rewards}:9)"
    assert details[2] == f"the reward Moody: SystemExit: no judge ({rewards}:11)"
    assert details[3] == f"the reward Moody: KeyboardInterrupt ({rewards}:13)"
    assert details[4].startswith("the reward Moody: TypeError: returned 'good', wanted a number, numbers by name")
    for one in found:  # stored and read back with its failure
        write_trajectories(rewards.with_name("one.parquet"), [one])
        assert read_trajectories(rewards.with_name("one.parquet")) == (one,)


def test_a_failure_is_a_line_without_a_full_stop_so_that_a_sentence_may_go_on() -> None:
    text = "wanted a number, as in return 1."
    assert str(PluginFailure(source="it", error="E", message=text, location="a.py:3")) == f"it: E: {text[:-1]} (a.py:3)"
    assert str(PluginFailure(source="it", error="E", message=text)) == f"it: E: {text[:-1]}"


def test_failed_rewards_are_counted_and_leave_the_group(rewards: Path) -> None:
    """Two of six are left: the statistics of the group are theirs alone."""
    found = collected(load_plugin("rewards", f"{rewards}:Moody")(), samples=6)
    metrics = summarise([one.figures for one in found])
    assert metrics["stop/reward_error"] == pytest.approx(4 / 6)
    kept, masked = split_masked(found, DEFAULT_STOPS)
    assert [one.trajectory.sample for one in masked] == [1, 2, 3, 4]
    assert scores_of(kept).total_N.tolist() == [1.0, 1.0]


def test_a_reward_that_never_returns_ends_its_trajectory_where_it_is() -> None:
    def loops(trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        while not RELEASE.is_set():
            pass
        return {}

    RELEASE.clear()
    parts = engine(ScriptedSampler(lambda _: said("answer 1")), reward_seconds=0.5)
    (one,) = collected(loops, samples=1, parts=parts)
    RELEASE.set()
    limit, line = "0.5 seconds (rollout.limits.reward_seconds)", loops.__code__.co_firstlineno
    assert one.trajectory.detail.startswith(f"the reward loops: no result within {limit} (tests/test_user_code.py:")
    assert line < int(one.trajectory.detail.rstrip(")").rpartition(":")[2]) <= line + 2


def test_a_run_shows_failures_in_one_line_each_and_with_debug_their_tracebacks(rewards: Path, tmp_path: Path) -> None:
    small = ("warm_start.steps=1", "train.steps=1", "train.eval_every=0", "evaluate.problems=2")
    changes = ("train.max_failed=1", f"reward={{name: '{rewards}:Moody'}}", f"runs_dir={tmp_path}")
    done = run("train", *TINY, *small, *changes, "name=moody", "--debug")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line, error in ((9, "ZeroDivisionError: division by zero"), (11, "SystemExit: no judge"), (13, "KeyboardInt")):
        (shown,) = [text for text in lines if "  4 of 16 " in text and error in text]
        assert f"trajectories failed (reward_error): the reward Moody: {error}" in shown
        assert f"({rewards}:{line})" in shown
    assert '    return {"brief": 1 / 0}' in done.stdout  # of the traceback
    (step,) = [line for line in read_metrics(tmp_path / "moody/metrics.jsonl") if "masked" in line]
    assert (step["stop/reward_error"], step["masked"]) == (0.75, 0.75)
    read = read_trajectories(tmp_path / "moody/trajectories/step_000001.parquet")
    failures = [one.trajectory.failure for one in read if one.trajectory.failure is not None]
    assert len(failures) == 12


def test_a_run_stops_if_every_reward_fails_and_a_hanging_one_does_not_hold_up_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import itertools, time\n"
        "calls = itertools.count(1)\n"
        "class Typo:\n    def __call__(self, trajectory, problem):\n"
        "        return {'brief': 1.0 if next(calls) < 4 else trajectory.anwser}\n"  # 3 are of the rehearsal
        "class Hangs:\n    def __call__(self, trajectory, problem):\n"
        "        if next(calls) > 3:\n            open(__file__ + '.called', 'w').close()\n"
        "            time.sleep(1000)\n"
        "        return {'brief': 1.0}\n"
    )
    small = (*TINY, "warm_start.steps=1", "train.steps=1", "evaluate.problems=1", f"runs_dir={tmp_path}")
    done = run("train", *small, f"reward={{name: '{tmp_path}/bad.py:Typo'}}", "name=typo")
    assert done.returncode == 1
    assert "the trajectory failed: the reward Typo: AttributeError" in done.stderr
    assert f"({tmp_path}/bad.py:5)" in done.stderr
    process = start("train", *small, f"reward={{name: '{tmp_path}/bad.py:Hangs'}}", "name=hangs")
    wait_for(tmp_path / "bad.py.called", process)
    process.send_signal(signal.SIGINT)
    wait_for_error("press Ctrl-C again to quit now", process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=240) in (130, -signal.SIGINT)


# --- tasks, condensers and tools --------------------------------------------------------------------------------------


class Interrupts(Counting):
    """An environment whose first step raises what Ctrl-C raises, but in the loop's own thread."""

    async def step(self, reply: Message) -> Step:
        raise KeyboardInterrupt


class Spawns(Counting):
    """An environment that starts a task of its own, which exits."""

    async def step(self, reply: Message) -> Step:
        async def leave() -> None:
            sys.exit("gone")

        task = asyncio.create_task(leave())
        await asyncio.wait({task})
        assert isinstance(task.exception(), SystemExit)
        return await super().step(reply)


class InterruptingCondenser(Condenser):
    """A condenser that raises what Ctrl-C raises."""

    async def condense(self, history: History, budget: Budget) -> Condensed:
        raise KeyboardInterrupt


def test_an_interrupt_that_a_plugin_raises_is_its_trajectorys() -> None:
    for one in collected(fine, samples=2, environment=Interrupts):
        assert one.trajectory.stop is StopReason.ENVIRONMENT_ERROR
        assert one.trajectory.detail.startswith("the environment: KeyboardInterrupt (tests/test_user_code.py:")
    parts = engine(agent(counting), condenser=InterruptingCondenser())
    for one in collected(fine, samples=2, parts=parts):
        assert one.trajectory.detail.startswith("the condenser 'chosen': KeyboardInterrupt (tests/test_user_code.py:")


def test_an_exit_in_a_task_of_a_plugin_does_not_end_the_event_loop() -> None:
    (one,) = collected(fine, samples=1, environment=Spawns)
    assert one.trajectory.stop is StopReason.ANSWERED


RELEASE = threading.Event()


def test_a_synchronous_environment_plays_in_threads_and_one_that_hangs_ends_its_own_trajectory() -> None:
    class Synchronous:
        def __init__(self, posed: Problem) -> None:
            self.hangs = posed.id == "p1"

        def start(self) -> tuple[Message, ...]:
            return (Message(role="user", content="hi"),)

        def step(self, reply: Message) -> Step:
            if self.hangs:
                RELEASE.wait(60)
            return Step(done=True, answer="1")

    RELEASE.clear()
    parts = engine(ScriptedSampler(lambda _: said("answer 1")), turn_seconds=1.0)
    found = play_all(parts, [problem(number) for number in range(3)], cast(Any, Synchronous))
    RELEASE.set()
    assert [one.stop for one in found] == [StopReason.ANSWERED, StopReason.ENVIRONMENT_ERROR, StopReason.ANSWERED]
    message = "the environment: no result within 1 second (rollout.limits.turn_seconds)"
    line = Synchronous.step.__code__.co_firstlineno + 2
    assert found[1].detail == f"{message} (tests/test_user_code.py:{line})"


def test_a_synchronous_tool_that_hangs_is_an_observation() -> None:
    def blocks() -> str:
        """Blocks."""
        RELEASE.wait(60)
        return "late"

    RELEASE.clear()
    parts = engine(agent(partial(calls, "blocks")), tools={"blocks": blocks}, tool_seconds=0.2)
    (one,) = collected(fine, samples=1, parts=parts)
    RELEASE.set()
    assert one.trajectory.answer == "Error: blocks did not finish within 0.2 seconds"
    assert summarise([one.figures])["tool_calls_abandoned"] == 1.0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_that_a_tool_raises_is_an_observation(error: type[BaseException]) -> None:
    async def later() -> str:
        """Exits."""
        raise error

    def at_once() -> str:
        """Exits."""
        raise error

    for tool in (later, at_once):
        parts = engine(agent(partial(calls, "leave")), tools={"leave": tool})
        (one,) = collected(fine, samples=1, parts=parts)
        assert one.trajectory.answer == f"Error: leave: {error.__name__}"


def calls(name: str, prompt: str) -> str:
    """One call of a tool without arguments, then an answer with what it gave."""
    newest = prompt.rpartition("<|im_end|>")[0].rpartition("<|im_start|>")[2]
    if "<result>" in newest:
        return "answer " + newest.partition("<result>")[2].partition("</result>")[0].strip()
    return f'<tool>{{"name": "{name}", "args": {{}}}}</tool>'


def test_a_plain_function_that_returns_a_coroutine_is_a_faulty_tool() -> None:
    async def inner() -> str:
        return "done"

    def outer() -> Any:
        """Forgets to wait."""
        return inner()

    (one,) = collected(fine, samples=1, parts=engine(agent(partial(calls, "outer")), tools={"outer": outer}))
    (result,) = one.trajectory.turns[0].observations
    assert "define the tool with async def" in result.content


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        (lambda _: Counting, "environment() returned the class Counting, wanted an object: Counting(…)"),
        (lambda _: Environment, "environment() returned the class Environment, wanted an object: Environment(…)"),
        (lambda _: None, "environment() returned None, wanted an object with start() and step(), as in"),
    ],
)
def test_a_task_that_returns_the_wrong_thing_is_told_what_to_return(environment: Any, complaint: str) -> None:
    (one,) = collected(fine, samples=1, environment=environment)
    assert one.trajectory.stop is StopReason.ENVIRONMENT_ERROR
    assert complaint in one.trajectory.detail


def test_an_exit_while_a_plugin_is_loaded_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit('not today')\n")
    with pytest.raises(PluginError, match=r"leaves\.py: SystemExit: not today"):
        load_plugin("rewards", f"{tmp_path}/leaves.py:Anything")


@pytest.mark.parametrize("body", ["raise KeyboardInterrupt", "sys.exit('no')"])
def test_what_a_constructor_raises_ends_a_command_with_its_line(tmp_path: Path, body: str) -> None:
    (tmp_path / "mine.py").write_text(
        f"import sys\nclass Mine:\n    def __init__(self):\n        {body}\n    def __call__(self, t, p): ...\n"
    )
    done = run("train", *TINY, f"reward={{name: '{tmp_path}/mine.py:Mine'}}", f"runs_dir={tmp_path}")
    assert done.returncode == 2
    assert "setting up the reward" in done.stderr
    assert f"{tmp_path}/mine.py:4)" in done.stderr


class Broken(InterruptingCondenser):
    """A condenser whose figures and properties fail."""

    @property
    def writes(self) -> int:
        raise LookupError("nothing")

    def counts(self) -> Mapping[str, float]:
        raise LookupError("nothing")


def test_a_property_of_a_condenser_that_raises_ends_its_trajectory() -> None:
    (one,) = collected(fine, samples=1, parts=engine(agent(counting), condenser=Broken()))
    assert one.trajectory.detail.startswith("the condenser 'chosen': LookupError: nothing (tests/test_user_code.py:")


class Reported(Observer):
    """Keeps the failures that it is shown."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def trajectories_failed(self, text: str, traceback: str) -> None:
        self.failures.append(text)


def test_counts_of_a_condenser_that_raise_are_reported_and_left_out() -> None:
    reported = Reported()
    assert condenser_counts(Broken().counts, reported) == {}
    (text,) = reported.failures
    assert text.startswith("the counts of the condenser: LookupError: nothing (tests/test_user_code.py:")


# --- chat templates and tokenizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% for i in range(10 ** 12) %}{% endfor %}", "fails: OverflowError: .*line 1 of the template"),
        ("\n\n{{ 1 / 0 }}", "fails: ZeroDivisionError: division by zero .line 3 of the template"),
        ("{{ messages.none.such }}", "refuses them: .*no attribute 'none'"),
        ("{% if %}", "refuses them: "),
    ],
)
def test_whatever_a_chat_template_raises_is_one_clear_error(template: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"setting up the prompts: rendering 2 messages .*chat template {complaint}"):
        Renderer(tokenizer(template + CHATML))


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    model = tmp_path / "model"
    qwen3().save_pretrained(model)  # 32 embeddings
    tokenizer().save_pretrained(model)
    config = validate({"model": {"path": str(model)}, "task": {"name": "ledger"}}, source="test")
    largest = max(tokenizer().get_vocab().values())
    with pytest.raises(ConfigError, match=rf"it has ids up to {largest}, and the model has embeddings for 32 ids"):
        check_model(build(config), str(model))


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return [1, 2]", "the first is 1, wanted a sequence of Problem objects"),
        ("return None", r"problems\(\) returned None, wanted a sequence of Problem objects, .* \(.*mine\.py:1\)"),
        ("yield 1", r"problems\(\) returned <generator .*, wanted a sequence of Problem objects"),
        ("return {}['train']", r"KeyError: 'train' \(.*mine\.py:3\)"),
    ],
)
def test_a_task_that_makes_no_problems_is_one_clear_error(tmp_path: Path, body: str, found: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        f"class Mine:\n    def problems(self, split):\n        {body}\n    def environment(self, problem): ...\n"
    )
    config = validate({"model": {"path": "/no/model"}, "task": {"name": f"{path}:Mine"}}, source="test")
    with pytest.raises(ConfigError, match=f"making the (train|eval) problems of the task: {found}"):
        build(config).problems("train")
