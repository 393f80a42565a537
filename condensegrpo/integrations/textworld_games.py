"""Games of TextWorld: made once and kept in a folder, or given as files; and one of them as it is played."""

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from glob import glob
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from condensegrpo.core.errors import ConfigError, DataMissing
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
_starting = threading.Lock()


def given_games(pattern: str) -> Sequence[Path]:
    """The files of a pattern.

    Raises:
        DataMissing: there is none, or the ``.json`` beside a game is missing.
    """
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

    Raises:
        ConfigError: a game cannot be made.
    """
    from tqdm import tqdm

    chosen = DEFAULTS[game] if arguments is None else arguments
    flags = [word for name, value in chosen.items() if value is not False for word in _flag(name, value)]
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
    """A game in its interpreter, of which every game loads a copy of its own."""

    def __init__(self, file: str, *, admissible: bool) -> None:
        """Nothing is opened before ``start``; ``admissible``: whether texts list the commands that have an effect."""
        self._file, self._admissible = file, admissible
        self._environment: Any = None
        self._state: Any = None

    def start(self) -> str:
        """The first observation."""
        import textworld

        requested = textworld.EnvInfos(
            score=True, max_score=True, won=True, lost=True, admissible_commands=self._admissible
        )
        with _starting:  # reading a game uses parsers of the process
            self._environment = textworld.start(self._file, requested)
            self._environment.seed(0)
            self._state = self._environment.reset()
        return self._text(self._state.feedback)

    def play(self, command: str) -> str:
        """What the game says to a command. Commands of the interpreter, such as ``save``, are not understood."""
        if NOT_PLAYED.search(command):
            return self._text(ANSWERS[0])
        sent = " ".join(command.split()).encode()[:LONGEST].decode(errors="ignore")
        self._state, *_ = self._environment.step(sent)
        return self._text(self._state.feedback)

    def close(self) -> None:
        """Free the interpreter."""
        if self._environment is not None:
            self._environment.close()

    @property
    def done(self) -> bool:
        """Whether the game is won or lost."""
        return bool(self._state.won or self._state.lost)

    @property
    def won(self) -> bool:
        """Whether the game is won."""
        return bool(self._state.won)

    @property
    def score(self) -> float:
        """The share of the points that were made, from 0 to 1; of a game without points, 1 if it is won."""
        return self._state.score / self._state.max_score if self._state.max_score else float(self.won)

    def _text(self, feedback: str) -> str:
        """A text of the game without its banner, its empty lines and its status line, which follows the last ``>``."""
        lines = (line.strip() for line in (feedback.rpartition("\n>")[0] or feedback).splitlines())
        text = "\n".join(line for line in lines if not _DRAWN.fullmatch(line))
        return "\n".join((text, "Commands:", *self._state.admissible_commands)) if self._admissible else text


def _description(file: Path) -> Mapping[str, Any]:
    """What tw-make wrote of a game."""
    return dict(json.loads(file.with_suffix(".json").read_text(encoding="utf-8")))


def _flag(name: str, value: bool | int | str) -> Sequence[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]


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
