"""The task ``gym``: text environments with gymnasium's interface, such as those of gymnasium, GEM and TextArena.

    environment = make(id, **arguments)
    observation, info = environment.reset(seed=…)                             the first message of the user
    observation, reward, terminated, truncated, info = environment.step(…)    what follows from a reply

An observation is a text, or a picture: an array H × W × 3 of bytes, or what ``render`` draws (``rgb_array``). A seed is
a problem. The action is what the last ``<action>`` tag of a reply holds, or the whole reply without its thoughts. Where
actions are numbered (``Discrete``), it is a number.
"""

import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy
from annotated_types import Ge, Le

from condensegrpo.core.messages import MediaPart, Message
from condensegrpo.core.packages import check_installed
from condensegrpo.core.plugins import load_object
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.integrations.episode_thread import EpisodeThread
from condensegrpo.tasks.answers import pinned_messages
from condensegrpo.tasks.drawn import DrawnProblems
from condensegrpo.vision.image_files import as_png

DEFAULT = "gymnasium:make"
SYSTEM = "Reply with your next action as <action>your action</action>."
FIRST_TRAINING_SEED = 1_000_000  # those below are for evaluation
_COLOURED = re.compile(r"\x1b\[[\d;]+m([^\x1b]*)\x1b\[0m")
_resetting = threading.Lock()  # also what reads files with parsers of the process


@dataclass(kw_only=True, eq=False)
class Seeds(Task):
    """The options of a task whose problems are seeds of an environment. No seed is in both splits."""

    arguments: Mapping[str, Any] | None = None  # of every environment, by name
    eval_arguments: Mapping[str, Any] | None = None  # those that differ in evaluation
    outcome: Literal["sum", "last"] = "sum"  # of the rewards, paid by the reward ``environment``
    train_problems: Annotated[int, Ge(1)] = 100_000  # seeds, from FIRST_TRAINING_SEED on
    eval_problems: Annotated[int, Ge(1), Le(FIRST_TRAINING_SEED)] = 256  # seeds, from 0 on

    def seeds(self, split: Split, problem: Callable[[int], Problem]) -> Sequence[Problem]:
        """The problems of the seeds of a split, made when they are needed."""
        first, size = (FIRST_TRAINING_SEED, self.train_problems) if split == "train" else (0, self.eval_problems)
        return DrawnProblems(size=size, draw=lambda index: problem(first + index))

    def arguments_of(self, split: str) -> dict[str, Any]:
        """The arguments of every environment of a split."""
        return {**(self.arguments or {}), **(self.eval_arguments or {} if split == "eval" else {})}

    def outcome_of(self, rewards: Sequence[float]) -> float:
        """The outcome of an episode with these rewards."""
        return sum(rewards) if self.outcome == "sum" or not rewards else rewards[-1]


@dataclass(kw_only=True, eq=False)
class Gym(Seeds):
    """Text environments with gymnasium's interface, such as those of GEM and TextArena. No seed is in both splits."""

    make: str | Callable[..., Any] = DEFAULT  # package:function or path/to/file.py:Name; or from Python itself
    id: str = ""  # its first argument; empty: none. The others are ``arguments``
    system: str = SYSTEM  # the system message; empty for none

    def __post_init__(self) -> None:
        self._name = self.make if isinstance(self.make, str) else self.make.__name__
        if self._name == DEFAULT:
            check_installed("gymnasium", extra="gym", instead="name another library in task.options.make")
        self._make = load_object("environments", self.make) if isinstance(self.make, str) else self.make

    def problems(self, split: Split) -> Sequence[Problem]:
        """The seeds of a split."""
        name, arguments = self.id or self._name, self.arguments_of(split)

        def problem(seed: int) -> Problem:
            data = {"seed": seed, "arguments": arguments}
            return Problem(id=f"{split}-{seed}", question=f"{name} with seed {seed}", data=data)

        return self.seeds(split, problem)

    def environment(self, problem: Problem) -> "GymEpisode":
        """A fresh episode."""
        make = partial(self._make, *((self.id,) if self.id else ()), **problem.data["arguments"])
        return GymEpisode(make, self.outcome_of, seed=problem.data["seed"], system=self.system)


class GymEpisode(Environment):
    """One episode, in a thread of its own."""

    def __init__(
        self, make: Callable[[], Any], outcome_of: Callable[[Sequence[float]], float], *, seed: int, system: str
    ) -> None:
        """Nothing is made before ``start``; ``outcome_of``: what an episode with such rewards was worth."""
        self._make, self._outcome_of, self._seed, self._system = make, outcome_of, seed, system
        self._thread = EpisodeThread("environment")
        self._environment: Any = None
        self._rewards = list[float]()

    async def start(self) -> tuple[Message, ...]:
        """The system message and the first observation."""
        return pinned_messages(system=self._system, question=await self._thread.call(self._reset))

    async def step(self, reply: Message) -> Step:
        """The next observation, or the end with its outcome."""
        action, fault = self._action(action_in(reply.text))
        if fault:
            return Step(observations=(Message(role="user", content=fault),))
        shown, done = await self._thread.call(self._step, action)
        observations = (Message(role="user", content=shown),)
        outcome = self._outcome_of(self._rewards) if done else None
        return Step(observations=observations, done=done, outcome=outcome)

    async def close(self) -> None:
        """Close the environment and let its thread end."""
        await self._thread.close(self._end)

    def _end(self) -> None:
        """Close the environment; after a start that was cancelled, the one that it made all the same."""
        if end := getattr(self._environment, "close", None):
            end()

    def _reset(self) -> str | tuple[MediaPart]:
        """The first observation. Some libraries seed the generators of the process: they get their states back."""
        with _resetting:
            states = random.getstate(), numpy.random.get_state()
            try:
                made = self._make()
                self._environment = TextArenaGame(made) if type(made).__module__.startswith("textarena.") else made
                observation, _ = self._environment.reset(seed=self._seed)
            finally:
                random.setstate(states[0])
                numpy.random.set_state(states[1])
        return self._shown(observation)

    def _step(self, action: object) -> tuple[str | tuple[MediaPart], bool]:
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        self._rewards.append(float(reward))
        return self._shown(observation), bool(terminated or truncated)

    def _action(self, text: str) -> tuple[object, str]:
        """The action as the environment takes it, or what is wrong with it."""
        space: Any = getattr(self._environment, "action_space", None)
        if not hasattr(space, "n"):
            return text, ""
        first, last = int(space.start), int(space.start + space.n - 1)
        number = int(text) if re.fullmatch(r"-?\d{1,9}", text) else None
        if number is None or not first <= number <= last:
            return None, f"Error: {text!r:.40} is no action, wanted a number from {first} to {last}."
        return number, ""

    def _shown(self, observation: object) -> str | tuple[MediaPart]:
        """What the policy reads or sees of an observation."""
        if not isinstance(observation, str) and not _is_picture(observation):
            mode = getattr(self._environment, "render_mode", None)
            if mode == "ansi":
                return _COLOURED.sub(r"[\1]", self._environment.render())
            observation = self._environment.render() if mode == "rgb_array" else observation
        return (picture_of(observation),) if _is_picture(observation) else str(observation)


class TextArenaGame:
    """A game of TextArena for one player, with gymnasium's interface."""

    def __init__(self, game: Any) -> None:  # noqa: ANN401  of a library that need not be installed
        self._game = game
        self._shown = ""  # the newest observation

    def reset(self, *, seed: int) -> tuple[str, Mapping[str, Any]]:
        """Begin a game."""
        self._game.reset(num_players=1, seed=seed)
        return self._observation(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Play an action; the reward is that of the game's end."""
        done, information = self._game.step(action)
        if not done:
            return self._observation(), 0.0, False, False, information
        rewards, information = self._game.close()
        return "", float((rewards or {}).get(0, 0.0)), True, False, information

    def _observation(self) -> str:
        """The newest observation, without the one before it at its beginning, which most games repeat."""
        before, self._shown = self._shown, str(self._game.get_observation()[1])
        return self._shown.removeprefix(before)


def action_in(reply: str) -> str:
    """The action of a reply.

    >>> action_in("<think>left?</think> <action> right </action>"), action_in("<think>left?</think> up")
    ('right', 'up')
    """
    said = reply.rpartition("</think>")[2]
    before, closed, _ = said.rpartition("</action>")
    return (before.rpartition("<action>")[2] if closed and "<action>" in before else said).strip()


def _is_picture(observation: object) -> bool:
    return isinstance(observation, numpy.ndarray) and observation.dtype == numpy.uint8 and observation.shape[2:] == (3,)


def picture_of(pixels: Any) -> MediaPart:  # noqa: ANN401  an array (H, W, 3) of bytes
    """The part that shows an array of pixels."""
    from PIL import Image  # here: most environments are texts

    return MediaPart.of(as_png(Image.fromarray(pixels)), "image/png")
