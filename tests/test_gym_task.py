"""The task ``gym``: environments with gymnasium's interface, among them a real one."""

import asyncio
import io
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import yaml
from command import ROOT
from PIL import Image
from talk import agent, engine, play_one
from waiting import eventually

from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import PluginError
from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.integrations.gym import Gym

PAGE = (ROOT / "docs" / "how-to" / "connect-gym.md").read_text(encoding="utf-8")


class Echo:
    """Wants the number that it draws from the generator of the process, as GEM's environments do."""

    closed: list[int]

    def __init__(self, rounds: int = 2) -> None:
        self.rounds, self.thread = rounds, threading.get_ident()

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        self.number = random.randrange(1000)
        return f"say {self.number}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert threading.get_ident() == self.thread
        self.rounds -= 1
        return f"again {self.number}", 0.25 if action == str(self.number) else 0.0, False, self.rounds == 0, {}

    def close(self) -> None:
        Echo.closed.append(self.number)


def play(task: Gym, reply: Callable[[str], str], count: int = 1, max_turns: int = 20) -> list[Trajectory]:
    """Twice each of the first training problems, at the same time."""
    parts = engine(agent(reply), max_turns=max_turns, max_context_tokens=8000)

    async def episodes() -> list[Trajectory]:
        problems = task.problems("train")[:count]
        return await asyncio.gather(
            *(play_one(parts, each, task.environment, sample=n) for each in problems for n in (0, 1))
        )

    return asyncio.run(episodes())


def repeat(prompt: str) -> str:
    return f"<think>hm</think> <action>{re.findall(r'(?:say|again) ([0-9]+)', prompt)[-1]}</action>"


@pytest.mark.parametrize(("outcome", "worth"), [("sum", 0.5), ("last", 0.25)])
def test_an_episode_is_a_seed_whose_rewards_are_the_outcome(outcome: str, worth: float) -> None:
    Echo.closed = []
    random.seed(7)
    state = random.getstate()
    task = Gym(make=Echo, outcome=outcome, train_problems=16)  # type: ignore[arg-type]  # parametrised as str
    trajectories = play(task, repeat, count=16)
    assert random.getstate() == state
    assert {(each.stop, each.outcome) for each in trajectories} == {(StopReason.FINISHED, worth)}
    starts = [each.turns[0].context[-1].text for each in trajectories]
    assert starts[::2] == starts[1::2]  # a group begins alike
    assert len(set(starts)) > 8
    again = starts[0].replace("say", "again")
    assert [turn.observations[0].text for turn in trajectories[0].turns] == [again, again]  # the last one too
    assert len(Echo.closed) == 32
    threads = [thread for thread in threading.enumerate() if thread.name == "environment"]
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_limit_ends_an_episode_without_an_outcome_and_the_splits_share_no_seed() -> None:
    Echo.closed = []
    task = Gym(make=Echo, arguments={"rounds": 9}, eval_arguments={"rounds": 1}, system="", train_problems=300)
    stopped, _ = play(task, lambda _: "7", max_turns=3)
    assert (stopped.stop, stopped.outcome, len(Echo.closed)) == (StopReason.TURN_LIMIT, None, 2)
    assert [message.role for message in stopped.turns[0].context] == ["user"]
    seeds = {name: {problem.data["seed"] for problem in task.problems(name)} for name in ("train", "eval")}
    assert not seeds["train"] & seeds["eval"]
    assert task.problems("eval")[0].data["arguments"] == {"rounds": 1}


def test_an_environment_that_is_made_after_its_start_was_given_up_is_closed() -> None:
    """As one of many that wait for each other to be made."""
    Echo.closed = []
    making, given_up = threading.Event(), threading.Event()

    def slow() -> Echo:
        making.set()
        given_up.wait(10)
        return Echo()

    async def scenario() -> None:
        task = Gym(make=slow)
        episode = task.environment(task.problems("train")[0])
        starting = asyncio.create_task(episode.start())
        await asyncio.to_thread(making.wait, 10)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await episode.close()
        given_up.set()

    asyncio.run(scenario())
    assert eventually(lambda: len(Echo.closed) == 1)


def test_a_library_that_is_not_installed_is_named() -> None:
    with pytest.raises(PluginError, match="looking for 'no_such_library:make' among the environments"):
        Gym(make="no_such_library:make")


def test_the_example_of_the_page_is_won_by_a_path_that_is_known() -> None:
    pytest.importorskip("gymnasium")
    (block,) = re.findall(r"```yaml\n(# lake\.yaml.*?)```", PAGE, re.DOTALL)
    task = build_plugin("tasks", "gym", yaml.safe_load(block)["task"]["options"])

    def walk(prompt: str) -> str:
        done = prompt.count("<|im_start|>assistant") - 1
        return f"<action>{['left', 9, 1, 1, 2, 1, 2, 2][done]}</action>"

    trajectory, _ = play(task, walk)
    texts = [turn.observations[0].text for turn in trajectory.turns[:-1]]
    assert trajectory.turns[0].context[-1].text == "\n[S]FFF\nFHFH\nFFFH\nHFFG\n"
    assert texts[0] == "Error: 'left' is no action, wanted a number from 0 to 3."
    assert texts[2] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\n"
    assert (trajectory.stop, trajectory.outcome, len(trajectory.turns)) == (StopReason.FINISHED, 1.0, 8)


class Painted(Echo):
    """Shows a picture in place of a text; with ``drawn`` only when it is rendered."""

    def __init__(self, *, drawn: bool) -> None:
        super().__init__(rounds=2)
        self.render_mode = "rgb_array" if drawn else None

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observation(), {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observation(), *super().step(action)[1:]

    def render(self) -> numpy.ndarray:
        return numpy.full((4, 6, 3), self.rounds, dtype=numpy.uint8)

    def _observation(self) -> object:
        return {"position": 1} if self.render_mode else self.render()


@pytest.mark.parametrize("drawn", [False, True])
def test_arrays_of_bytes_are_shown_as_pictures(drawn: bool) -> None:
    Echo.closed = []
    task = Gym(make=lambda drawn: Painted(drawn=drawn), arguments={"drawn": drawn})

    async def shown() -> list[Message]:
        episode = task.environment(task.problems("eval")[0])
        *_, first = await episode.start()
        step = await episode.step(Message(role="assistant", content="go"))
        await episode.close()
        return [first, *step.observations]

    for message in asyncio.run(shown()):
        (part,) = message.media
        assert part.data is not None
        picture = Image.open(io.BytesIO(part.data))
        assert (picture.size, picture.mode, part.type) == ((6, 4), "RGB", "image/png")
