"""The task ``textworld``: text adventures that TextWorld makes (https://arxiv.org/abs/1806.11532), or any made before.

    You are hungry! Let's cook a delicious meal. Check the cookbook in the kitchen for the recipe. …
    ─▶  <action>go west</action>
    -= Kitchen =- … On the table you make out a cookbook. …
    ─▶  <action>examine cookbook</action>

A game is a problem, made once for each seed and kept in a folder. The action of a reply is read as in the task ``gym``;
what the game does not understand it answers itself. Every game knows commands that win it: its walkthrough.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.core.messages import Message
from condensegrpo.core.packages import check_installed
from condensegrpo.core.protocols.condenser import Request
from condensegrpo.core.protocols.environment import Step
from condensegrpo.core.protocols.task import Problem, Split
from condensegrpo.integrations.episode_thread import EpisodeThread
from condensegrpo.integrations.gym import FIRST_TRAINING_SEED, SYSTEM, action_in
from condensegrpo.integrations.textworld_games import (
    ANSWERS,
    Arguments,
    Game,
    given_games,
    goal,
    made_games,
    walkthrough,
    words,
)
from condensegrpo.tasks.answer_environment import pinned_messages

RECIPE = re.compile(r"Ingredients:.*?prepare meal", re.DOTALL)


@dataclass(kw_only=True, eq=False)
class TextWorld:
    """The task ``textworld``. No seed, and no file, is in both splits.

    Raises:
        ValueError: textworld is not installed.
    """

    game: Literal["cooking", "treasure_hunter", "coin_collector"] = "cooking"
    arguments: Arguments | None = None  # of ``tw-make tw-GAME``, such as {level: 5}; None: those of DEFAULTS
    train_games: Annotated[int, Ge(1)] = 64  # of the seeds from FIRST_TRAINING_SEED on
    eval_games: Annotated[int, Ge(1), Le(FIRST_TRAINING_SEED)] = 32  # of the seeds from 0 on
    folder: str | None = None  # of the games that are made; None: in the user's cache
    data: str | None = None  # pattern of game files to train on, such as games/*.z8; None: games are made
    eval_data: str | None = None  # likewise of those to evaluate on; needed with ``data``
    outcome: Literal["score", "won"] = "score"  # the share of the points, or 1 for a game that is won
    max_commands: Annotated[int, Ge(1)] = 50  # after which a game ends with the score so far
    admissible: bool = False  # whether observations list the commands that have an effect
    system: str = SYSTEM  # the system message; empty for none

    def __post_init__(self) -> None:
        instead = "choose another task (textworld brings jericho, which is under the GPL)"
        check_installed("textworld", extra="textworld", instead=instead)
        if (self.data is None) != (self.eval_data is None):
            raise ConfigError("setting up the task textworld: wanted both of task.data and task.eval_data, or neither.")

    def problems(self, split: Split) -> Sequence[Problem]:
        """The games of a split; those that were never made are made, some seconds each.

        Raises:
            ConfigError: a game cannot be made, or is in both splits.
            DataMissing: no file has the pattern, or the ``.json`` beside a game is missing.
        """
        return [
            Problem(id=f"{split}-{file.stem}", question=goal(file), data={"file": str(file)})
            for file in self._files(split)
        ]

    def environment(self, problem: Problem) -> "TextWorldEpisode":
        """A fresh episode."""
        return TextWorldEpisode(self, problem.data["file"])

    def expert(self, problem: Problem) -> "Walkthrough":
        """The player of a game's walkthrough.

        Raises:
            DataError: the game has none.
        """
        commands = walkthrough(Path(problem.data["file"]))
        if not commands:
            raise DataError(
                f"looking for what wins {problem.data['file']}: it has no walkthrough. Set warm_start.steps=0"
            )
        return Walkthrough(commands)

    def corpus(self) -> Iterable[str]:
        """Every name and description of the games, and what is said when their walkthroughs are played."""
        return self._texts

    @cached_property
    def _texts(self) -> Sequence[str]:
        texts = [f"{self.system} <action> </action> Commands: look {' '.join(ANSWERS)}"]
        for problem in (*self.problems("train"), *self.problems("eval")):
            file = Path(problem.data["file"])
            game = Game(str(file), admissible=self.admissible)
            texts.append(game.start())
            texts += [text for command in walkthrough(file) for text in (command, game.play(command))]
            game.close()
            texts += words(file)
        return texts

    def _files(self, split: Split) -> Sequence[Path]:
        if self.data is None or self.eval_data is None:
            training = range(FIRST_TRAINING_SEED, FIRST_TRAINING_SEED + self.train_games)
            seeds = training if split == "train" else range(self.eval_games)
            return made_games(self.game, self.arguments, seeds, self.folder)
        files, others = given_games(self.data), given_games(self.eval_data)
        if both := sorted({*files} & {*others}):
            raise ConfigError(
                f"reading the games: {both[0]} fits task.data and task.eval_data. Give disjoint patterns."
            )
        return files if split == "train" else others


class TextWorldEpisode:
    """One game, played in a thread of its own."""

    def __init__(self, task: TextWorld, file: str) -> None:
        """Nothing is opened before ``start``."""
        self._task = task
        self._game = Game(file, admissible=task.admissible)
        self._thread = EpisodeThread("the TextWorld game")
        self._commands = 0

    async def start(self) -> tuple[Message, ...]:
        """The system message and the first observation."""
        return pinned_messages(system=self._task.system, question=await self._thread.call(self._game.start))

    async def step(self, reply: Message) -> Step:
        """What the game says to a command, or the end with its outcome."""
        text = await self._thread.call(self._game.play, action_in(reply.text))
        self._commands += 1
        observations = (Message(role="user", content=text),)
        if not self._game.done and self._commands < self._task.max_commands:
            return Step(observations=observations)
        outcome = self._game.score if self._task.outcome == "score" else float(self._game.won)
        return Step(observations=observations, done=True, outcome=outcome)

    async def close(self) -> None:
        """Close the game and let its thread end."""
        await self._thread.close(self._game.close)


class Walkthrough:
    """Plays the commands that win a game. A summary has the recipe, if it was read, and the commands so far."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands = iter(commands)
        self._written = -1  # turn of the last unit in a summary

    def reply(self, context: Sequence[Message]) -> str:
        """The next command, whatever is shown."""
        command = next(self._commands, None)
        if command is None:
            raise ValueError("the walkthrough has ended, and the game has not")
        return f"<action>{command}</action>"

    def write(self, request: Request) -> str:
        """A summary of the units that are shown, the last summary among them."""
        lines = []
        for unit in request.units:
            if unit.is_summary:  # what it says of units that were kept beside it is not said again
                lines.append(unit.reply.text)
            elif not request.units[0].is_summary or unit.turn > self._written:
                lines.append(action_in(unit.reply.text))
                lines += [recipe[0] for result in unit.results if (recipe := RECIPE.search(result.text))]
        self._written = request.units[-1].turn
        return "\n".join(lines)
