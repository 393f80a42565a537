"""One run is one folder, and everything in it can be read without a model.

runs/<name>/
    config.yaml                      resolved configuration
    configurations.jsonl             a line for each configuration that the run had, with its first step
    environment.json                 versions, command line, git revision, hardware
    trackers.json                    by tracker, the identity of its own run, which a resume continues
    metrics.jsonl                    one line a step or evaluation
    trajectories/step_000123.parquet one row a trajectory, written when the batch is complete
    credit/step_000123.parquet       advantage and token weight of every turn, handling
    evaluations/step_000123/         <name>.parquet: the trajectories of an evaluation of the policy after that step
    tokenizer.json                   of the policy
    media/<sha256>                   the pictures that its trajectories show
    checkpoints/ origin/ log.txt     written by the learner and the training loop
    lock                             held by the process that writes
"""

import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from condensegrpo.core.errors import DataError, RunError
from condensegrpo.core.protocols.tracker import Tracker
from condensegrpo.storage.codec import dump_line
from condensegrpo.storage.files import (
    REPLACED,
    TEMPORARY,
    append_line,
    is_locked,
    open_here,
    read_lines,
    write_atomically,
    writing,
)
from condensegrpo.storage.media import MediaFolder

MANIFEST = "manifest.json"  # of a checkpoint: ``learner/checkpoint.py``
_STEP_FILE = re.compile(r"step_(\d+)(\.part-\d+)?\.parquet")
_STEP_FOLDER = re.compile(r"step_(\d+)")


class _Inside:
    """The path of something in a run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunFolder", kind: type) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run and the names inside it."""

    path: Path

    config = _Inside("config.yaml")  # the resolved configuration
    configurations = _Inside("configurations.jsonl")  # a line for each configuration that it had, with its first step
    metrics = _Inside("metrics.jsonl")  # a line for each step or evaluation
    trackers = _Inside("trackers.json")  # the identities of the runs of trackers, by tracker
    log = _Inside("log.txt")  # the console output, with times
    checkpoints = _Inside("checkpoints")  # of the learner
    trajectory_folder = _Inside("trajectories")  # the files of all steps
    credit_folder = _Inside("credit")  # likewise
    evaluation_folder = _Inside("evaluations")  # of all steps

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new run folder; the folder may exist if it is empty."""
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise RunError(f"creating the run folder {path}: the folder is not empty. Give another folder.")
            run = cls(path)
            for folder in (run.trajectory_folder, run.credit_folder, run.checkpoints):
                folder.mkdir()
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing run folder."""
        if not path.is_dir():
            raise RunError(f"opening the run folder {path}: no such folder. {_neighbours(path)}")
        if not (path / "config.yaml").is_file():
            raise RunError(
                f"opening the run folder {path}: it holds no config.yaml, so no run was started there. "
                f"{_neighbours(path)}"
            )
        return cls(path)

    @property
    def media(self) -> MediaFolder:
        """The pictures of its trajectories."""
        return MediaFolder(self.path / "media")

    @property
    def has_results(self) -> bool:
        """Whether anything was learned, measured or sampled in it: a start that was killed leaves nothing."""
        written = ("trajectories/*", "evaluations/*/*", "checkpoints/*", "origin/warm", "origin/.warm-checkpoints")
        measured = self.metrics.is_file() and self.metrics.stat().st_size > 0  # empty before the first metrics
        return measured or any(TEMPORARY not in file.name for each in written for file in self.path.glob(each))

    @property
    def in_use(self) -> bool:
        """Whether a process holds the lock."""
        return is_locked(self.path / "lock", fcntl.LOCK_SH)

    @property
    def last_step(self) -> int | None:
        """The last step that was logged; None: nothing was."""
        steps = [line["step"] for line in read_metrics(self.metrics)]
        return int(max(steps)) if steps else None

    def trajectories(self, step: int) -> Path:
        """The trajectories sampled for one optimiser step."""
        return self.trajectory_folder / f"step_{step:06d}.parquet"

    def credit(self, step: int) -> Path:
        """The credit of the trajectories of one optimiser step."""
        return self.credit_folder / f"step_{step:06d}.parquet"

    def evaluation(self, step: int, name: str) -> Path:
        """The trajectories of an evaluation of the policy after ``step`` steps."""
        return self.evaluation_folder / f"step_{step:06d}" / evaluation_file(name)

    def steps(self) -> tuple[int, ...]:
        """The steps that have trajectories, in order."""
        names = map(_STEP_FILE.fullmatch, os.listdir(self.trajectory_folder) if self.trajectory_folder.is_dir() else ())
        return tuple(sorted(int(name[1]) for name in names if name and not name[2]))

    def evaluated_steps(self, name: str) -> tuple[int, ...]:
        """The steps after which this evaluation was made, in order."""
        folders = (file.parent.name for file in self.evaluation_folder.glob(f"step_*/{evaluation_file(name)}"))
        return tuple(sorted(int(match[1]) for match in map(_STEP_FOLDER.fullmatch, folders) if match))

    def truncate_after(self, step: int) -> None:
        """Remove what was written after ``step``, so that a resumed run writes it again and nothing is there twice."""
        with writing(self.path):
            for folder in (self.trajectory_folder, self.credit_folder):
                folder.mkdir(exist_ok=True)  # a copy may have no empty folders
                for file in folder.iterdir():
                    match = _STEP_FILE.fullmatch(file.name)
                    if match and int(match[1]) > step:
                        file.unlink()
            for evaluated in self.evaluation_folder.glob("step_*"):
                match = _STEP_FOLDER.fullmatch(evaluated.name)
                if match and int(match[1]) > step:
                    shutil.rmtree(evaluated)
        lines = self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.is_file() else []
        kept = [line for line, read in zip(lines, read_metrics(self.metrics), strict=False) if read["step"] <= step]
        write_atomically(self.metrics, "".join(f"{line}\n" for line in kept))

    def remove_leftovers(self) -> None:
        """Remove what killed processes were writing. Only while the folder is locked.

        A folder that one had moved aside, and not replaced yet, gets its name back: a checkpoint that was saved again.
        """
        with writing(self.path):
            written = ("trajectories/*", "credit/*", "evaluations/*/*", "checkpoints/*", "origin/*")
            patterns = ("*", *written, "origin/.warm-checkpoints/*")
            for path in (path for pattern in patterns for path in self.path.glob(pattern)):
                name, replaced, _ = path.name.partition(REPLACED)
                if replaced and not path.with_name(name).exists():
                    path.rename(path.with_name(name))
                elif TEMPORARY in path.name:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for writing. The system releases the lock when the process ends, however it ends."""
        with writing(self.path):
            file = open_here(self.path / "lock", "a+", encoding="utf-8")
        with file:  # never unlinked: a second process could then lock a file that a third one cannot see
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise RunError(
                    f"locking the run folder {self.path}: run folder in use by another process "
                    f"({file.read().strip() or 'process unknown'}). Wait for it or stop it, or give this run "
                    f"another name (name=…)."
                ) from error
            except OSError as error:
                raise RunError(
                    f"locking the run folder {self.path}: {error.strerror}. Its file system has no file locks, which "
                    f"keep processes from writing into one file at a time. Set runs_dir to a folder of another file "
                    f"system, or mount this one with locks (Lustre: -o flock)."
                ) from error
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield


def evaluation_file(name: str) -> str:
    """The name of an evaluation's file: of ``truncate within 96 tokens``, ``truncate_within_96_tokens.parquet``."""
    return f"{re.sub(r'[^A-Za-z0-9.=+-]+', '_', name).strip('_')}.parquet"


def _neighbours(path: Path) -> str:
    """A sentence that names the runs in a folder that is none, or else those beside it."""
    inside = _runs_in(path)
    parent = path if inside else (path.resolve() if path.name in ("", "..") else path).parent  # "." names no parent
    return f"Runs in {parent}: {', '.join(inside or _runs_in(parent)) or 'none'}."


def _runs_in(folder: Path) -> list[str]:
    """The names of the runs in a folder, sorted."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(entry.name for entry in entries if (entry / "config.yaml").is_file())


class JsonlTracker(Tracker):
    """Appends ``{"step": …, name: value, …}`` to a file, one line a call, handed to the system at once."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        append_line(self._path, dump_line({"step": step, **metrics}))


def read_metrics(path: Path) -> tuple[dict[str, float], ...]:
    """The lines of a metrics file in order, without a last line that is cut off; none if the file is missing."""
    if not path.is_file():
        return ()
    metrics = []
    for number, line in enumerate(read_lines(path), 1):
        if not isinstance(line, dict) or not all(type(value) in (int, float) for value in line.values()):
            raise DataError(f"reading {path}, line {number}: wanted numbers by name, found {line!r:.60}. Remove it.")
        metrics.append({name: float(value) for name, value in line.items()})
    return tuple(metrics)
