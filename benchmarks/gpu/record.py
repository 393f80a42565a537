"""Results that survive a kill: each is a line of JSON in OUT/NAME.jsonl as soon as it is known; and a time limit."""

import argparse
import multiprocessing
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path

import torch
from sides import Run, Side

from condensegrpo.storage.environment import write_environment
from condensegrpo.storage.files import append_line


class OutOfTime(BaseException):
    """The time limit of a script has passed. No part of a measurement catches it."""


class Record:
    """The results of one script."""

    def __init__(self, name: str, out: Path) -> None:
        self.out, self._path, self._began = out, out / f"{name}.jsonl", time.monotonic()

    def note(self, event: str, **facts: object) -> None:
        """Write a result, and print it."""
        line = dumps({"event": event, "at": round(time.monotonic() - self._began, 2), **facts}, default=str)
        append_line(self._path, line)
        print(line[:400], flush=True)

    @contextmanager
    def attempt(self, **facts: object) -> Iterator[None]:
        """A part whose failure is noted, such as a lack of memory: the next part follows all the same."""
        try:
            yield
        except Exception as error:  # any library may fail on a machine where the script never ran
            traceback.print_exc()
            self.note("failed", **facts, error=f"{type(error).__name__}: {error}"[:1000])


@contextmanager
def recording(name: str, options: argparse.Namespace) -> Iterator[Record]:
    """The record of a script, which ends after ``options.seconds`` whatever it is doing. Its processes are killed."""
    options.out.mkdir(parents=True, exist_ok=True)
    record = Record(name, options.out)

    def over(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, options.seconds)
    try:
        record.note("begins", command=shlex.join(sys.argv), machine=write_environment(options.out).splitlines()[1:])
        yield record
        record.note("ends")
    except OutOfTime:
        record.note("out of time", seconds=options.seconds)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for process in multiprocessing.active_children():
            process.kill()


def parser(description: str | None, *, seconds: float) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")), help="results; default: $OUT")
    made.add_argument("--seconds", type=float, default=seconds, help="time limit of the script")
    made.add_argument(
        "--models", type=Path, default=Path("models"), help="random policies, made where they are missing"
    )
    made.add_argument("--rounds", type=int, default=3, help="timed runs of each, after one that is not")
    return made


def side(start: Callable[[], Run]) -> Side:
    """A process that loads at its first run. On a GPU it imports meanwhile; on a CPU it is a fork."""
    return Side(start, "spawn" if torch.cuda.is_available() else "fork")


def device() -> str:
    """cuda, or cpu where there is no GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype() -> str:
    """The type of the weights that a run gets here."""
    return "bfloat16" if torch.cuda.is_available() else "float32"
