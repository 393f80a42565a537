"""The task ``textworld``: text adventures that TextWorld makes (https://arxiv.org/abs/1806.11532), or any made before.

    You are hungry! Let's cook a delicious meal. Check the cookbook in the kitchen for the recipe. …
    ─▶  <action>go west</action>
    -= Kitchen =- … On the table you make out a cookbook. …
    ─▶  <action>examine cookbook</action>

A game is a problem, made once for each seed and kept in a folder. The action of a reply is read as in the task ``gym``;
what the game does not understand it answers itself. Every game knows commands that win it: its walkthrough.
"""

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from glob import glob
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from condensegrpo.core.condenser import Request
from condensegrpo.core.errors import ConfigError, DataError, DataMissing
from condensegrpo.core.messages import Message
from condensegrpo.core.packages import check_installed
from condensegrpo.core.protocols.task import Problem, Split, Task
from condensegrpo.integrations.gym import FIRST_TRAINING_SEED, SYSTEM, GymEpisode, action_in
from condensegrpo.storage.files import user_cache

Arguments = Mapping[str, bool | int | str]  # of tw-make by name; true sets a flag, false leaves it out
DEFAULTS: Mapping[str, Arguments] = {
    "cooking": {"recipe": 2, "take": 2, "go": 6, "open": True, "cut": True, "cook": True},
    "treasure_hunter": {"level": 10},
    "coin_collector": {"level": 8},
}
NOT_PLAYED = re.compile(r"(?i)\b(save|restore|restart|quit|q|script|transcript|undo)\b|\btw-")  # some write files
ANSWERS = ("That's not a verb I recognise.", "You can't see any such thing.", "I beg your pardon?")  # of every game
LONGEST = 198  # bytes of a command, of which the interpreter may not cut a letter in two
_DRAWN = re.compile(r"[\s_$|\\/>]*")  # a line of the banner, or an empty one
_CODE = re.compile(r"\[[^]]*\]")  # in a description: what depends on the state of the game


def given_games(pattern: str) -> Sequence[Path]:
    """The files of a pattern."""
    files = sorted({Path(name).resolve() for name in glob(os.path.expanduser(pattern), recursive=True)})
    for file in files or [Path(pattern)]:
        if not file.with_suffix(".json").is_file():
            raise DataMissing(
                f"reading the games {pattern}: found no {file.with_suffix('.json')}. Wanted a pattern of .z8 files, "
                f"each with the .json that tw-make writes beside it."
            )
    return files


def made_games(game: str, arguments: Arguments | None, seeds: range, folder: str | None) -> Sequence[Path]:
    """The games of some seeds, made where they are missing. Other processes wait until they are.

    Args:
        game: one of ``DEFAULTS``.
        arguments: of ``tw-make``; None: the defaults.
        folder: where they are kept; None: in the user's cache.
    """
    from tqdm import tqdm

    chosen = DEFAULTS[game] if arguments is None else arguments
    given = ((f"--{name.replace('_', '-')}", value) for name, value in chosen.items() if value is not False)
    flags = [word for flag, value in given for word in ([flag] if value is True else [flag, str(value)])]
    kept = Path(folder).expanduser() if folder else user_cache() / "textworld"
    kept /= "-".join([distribution("textworld").version, game, *(word.lstrip("-") for word in flags)])
    files = [kept / f"{seed}.z8" for seed in seeds]
    if all(file.exists() for file in files):
        return files
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [file for file in files if not file.exists()]
        make = partial(_make, (f"tw-{game}", *flags))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            for _ in tqdm(threads.map(make, missing), "making games", len(missing), disable=None):
                pass
    return files


def goal(file: Path) -> str:
    """What a game is about."""
    return str(_description(file)["objective"])


def walkthrough(file: Path) -> Sequence[str]:
    """Commands that win a game; none if its file holds none."""
    return tuple(_description(file)["metadata"].get("walkthrough", ()))


def words(file: Path) -> Iterator[str]:
    """Every name and description of a game."""
    for _, thing in _description(file)["infos"]:
        yield from (f"{thing['name']}{mark}" for mark in ("", ",", ".", "!") if thing["name"])
        yield _CODE.sub(" ", thing["desc"] or "")


class Game:
    """A game in its interpreter, with gymnasium's interface. Every game loads a copy of the interpreter."""

    def __init__(self, file: str, task: "TextWorld") -> None:
        """Nothing is opened before ``reset``."""
        self._file, self._task = file, task
        self._environment: Any = None
        self._state: Any = None
        self._commands = 0

    def reset(self, *, seed: int) -> tuple[str, Mapping[str, Any]]:
        """The first observation."""
        import textworld

        requested = textworld.EnvInfos(
            score=True, max_score=True, won=True, lost=True, admissible_commands=self._task.admissible
        )
        self._environment = textworld.start(self._file, requested)
        self._environment.seed(seed)
        self._state = self._environment.reset()
        return self._text(self._state.feedback), {}

    def step(self, command: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Give a command; returns the answer of the game and its worth so far.

        Commands of the interpreter, such as ``save``, are not understood.
        """
        self._commands += 1
        said = ANSWERS[0]
        if not NOT_PLAYED.search(command):
            sent = " ".join(command.split()).encode()[:LONGEST].decode(errors="ignore")
            self._state, *_ = self._environment.step(sent)
            said = self._state.feedback
        ended, late = bool(self._state.won or self._state.lost), self._commands >= self._task.max_commands
        return self._text(said), self.worth, ended, late, {}

    def close(self) -> None:
        """Free the interpreter."""
        if self._environment is not None:
            self._environment.close()

    @property
    def worth(self) -> float:
        """The share of the points that were made, from 0 to 1; of a game without points, 1 if it is won."""
        if self._task.outcome == "score" and self._state.max_score:
            return float(self._state.score / self._state.max_score)
        return float(self._state.won)

    def _text(self, feedback: str) -> str:
        """A text of the game without its banner, its empty lines and its status line, which follows the last ``>``."""
        lines = (line.strip() for line in (feedback.rpartition("\n>")[0] or feedback).splitlines())
        text = "\n".join(line for line in lines if not _DRAWN.fullmatch(line))
        return "\n".join((text, "Commands:", *self._state.admissible_commands)) if self._task.admissible else text


def _description(file: Path) -> Mapping[str, Any]:
    """What tw-make wrote of a game."""
    return dict(json.loads(file.with_suffix(".json").read_text(encoding="utf-8")))


def _make(arguments: Sequence[str], file: Path) -> None:
    """Make a game; its file appears last, and whole."""
    program = next(each for each in distribution("textworld").files or () if each.name == "tw-make").locate()
    with TemporaryDirectory(prefix=".making-", dir=file.parent) as aside:
        made = Path(aside, file.name)
        order = [sys.executable, program, *arguments, "--seed", file.stem, "--output", made, "--silent"]
        done = subprocess.run(list(map(str, order)), check=False, capture_output=True, text=True)
        if done.returncode or not made.exists():
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise ConfigError(
                f"making the game {file.stem} with tw-make {' '.join(arguments)}: {said[-1]}. Check "
                f"task.options.arguments against tw-make {arguments[0]} --help."
            )
        for suffix in (".json", ".z8"):
            made.with_suffix(suffix).rename(file.with_suffix(suffix))


RECIPE = re.compile(r"Ingredients:.*?prepare meal", re.DOTALL)


@dataclass(kw_only=True, eq=False)
class TextWorld(Task):
    """Text adventures of TextWorld, made here or before. No seed, and no file, is in both splits."""

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
        """The games of a split; those that were never made are made, some seconds each."""
        return [
            Problem(id=f"{split}-{file.stem}", question=goal(file), data={"file": str(file)})
            for file in self._files(split)
        ]

    def environment(self, problem: Problem) -> GymEpisode:
        """A fresh episode."""
        make = partial(Game, problem.data["file"], self)
        return GymEpisode(make, lambda worths: worths[-1], seed=0, system=self.system)

    def expert(self, problem: Problem) -> "Walkthrough":
        """The player of a game's walkthrough."""
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
            game = Game(str(file), self)
            texts.append(game.reset(seed=0)[0])
            texts += [text for command in walkthrough(file) for text in (command, game.step(command)[0])]
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
            if unit.is_note:  # what it says of units that were kept beside it is not said again
                lines.append(unit.reply.text)
            elif not request.units[0].is_note or unit.turn > self._written:
                lines.append(action_in(unit.reply.text))
                lines += [recipe[0] for result in unit.results if (recipe := RECIPE.search(result.text))]
        self._written = request.units[-1].turn
        return "\n".join(lines)
