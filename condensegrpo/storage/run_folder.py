"""One run is one folder, and everything in it can be read without a model. Floor 2: JSON lines in and out.

    runs/<name>/
        config.yaml                      resolved configuration
        metrics.jsonl                    one line a step or evaluation
        trajectories/step_000123.jsonl   one line a trajectory, written as it finishes
        credit/step_000123.jsonl         advantage and token weight of every turn, handling
        checkpoints/ origin/ log.txt     of the learner and the loop
        lock                             held by the process that writes

A line is written whole or not at all as far as the process can help it; what a killed process leaves behind, a cut-off
last line, is reported by the readers and cut away before the next line is appended.
"""

import errno
import fcntl
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from condensegrpo.core.errors import DataError, RunError, TrajectoryFileError
from condensegrpo.core.trajectory import ScoredTrajectory
from condensegrpo.storage.codec import decode, dump_line
from condensegrpo.storage.version_1 import converted_from_version_1

VERSION = 2  # of the lines in trajectories/ and credit/; lines of version 1 are read too

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STEP_FILE = re.compile(r".*?(\d+)\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """What a trajectory file holds."""

    trajectories: tuple[ScoredTrajectory, ...]  # in the order in which they finished
    problems: tuple[str, ...]  # what could not be read though the rest could: a cut-off last line


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What each turn of one trajectory was trained with."""

    trajectory: str  # Trajectory.id
    advantages: tuple[float, ...]  # (K,) of every trained token of the turn
    weights: tuple[float, ...]  # (K,) of one trained token of the turn in the optimiser step; 0.0: not trained
    handling: Literal["train", "mask", "penalise", "drop"] = "train"  # by its stop; drop: by dynamic sampling

    def __post_init__(self) -> None:
        if len(self.advantages) != len(self.weights):
            raise ValueError(
                f"credit needs one weight per advantage: {len(self.advantages)} advantages, {len(self.weights)} weights"
            )


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run and the names inside it."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new run folder; an empty folder that is there already will do.

        Raises:
            RunError: there is a run already, or the folder cannot be made.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise RunError(
                    f"creating the run folder {path}: there is something in it already. Continue that run with "
                    f"--resume {path}, or give this one another name (name=…)."
                )
            run = cls(path)
            for folder in (run.trajectory_folder, run.credit_folder, run.checkpoints):
                folder.mkdir()
        except OSError as error:
            raise _write_error(path, error) from error
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """A run folder that exists.

        Raises:
            RunError: it does not, or it holds no run.
        """
        if not path.is_dir():
            raise RunError(f"opening the run folder {path}: there is no such folder. {_neighbours(path)}")
        if not (path / "config.yaml").is_file():
            raise RunError(
                f"opening the run folder {path}: it holds no config.yaml, so no run was started there. "
                f"{_neighbours(path)}"
            )
        return cls(path)

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON line a step or evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """What the console said."""
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        """The learner's checkpoints."""
        return self.path / "checkpoints"

    @property
    def trajectory_folder(self) -> Path:
        """The trajectory files of all steps."""
        return self.path / "trajectories"

    @property
    def credit_folder(self) -> Path:
        """The credit files of all steps."""
        return self.path / "credit"

    def trajectories(self, step: int) -> Path:
        """The trajectories sampled for one optimiser step."""
        return self.trajectory_folder / f"step_{step:06d}.jsonl"

    def credit(self, step: int) -> Path:
        """The credit of the trajectories of one optimiser step."""
        return self.credit_folder / f"step_{step:06d}.jsonl"

    def steps(self) -> tuple[int, ...]:
        """The steps that have trajectories, in order."""
        found = (re.fullmatch(r"step_(\d+)\.jsonl", file.name) for file in self.trajectory_folder.glob("*.jsonl"))
        return tuple(sorted(int(match[1]) for match in found if match))

    def truncate_after(self, step: int) -> None:
        """Forget what lies after ``step``, so that a resumed run writes it anew and nothing stands twice."""
        try:
            for folder in (self.trajectory_folder, self.credit_folder):
                for file in folder.glob("*.jsonl"):
                    match = _STEP_FILE.fullmatch(file.name)
                    if match and int(match[1]) > step:
                        file.unlink()
        except OSError as error:
            raise _write_error(self.path, error) from error
        lines = self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.is_file() else []
        kept = [line for line, read in zip(lines, read_metrics(self.metrics), strict=False) if read["step"] <= step]
        write_atomically(self.metrics, "".join(f"{line}\n" for line in kept))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for writing. The system lets go of it when the process ends, however it ends.

        Raises:
            RunError: another process holds it; the message names that process and its host.
        """
        try:
            file = (self.path / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise _write_error(self.path, error) from error
        with file:  # never unlinked: a second process could then lock a file that a third one cannot see
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise RunError(
                    f"locking the run folder {self.path}: run folder in use by another process "
                    f"({file.read().strip() or 'it has not said which'}). Wait for it or stop it, or give this run "
                    f"another name (name=…)."
                ) from error
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield


def write_trajectory(path: Path, scored: ScoredTrajectory) -> None:
    """Append one trajectory to a file as one line.

    Raises:
        RunError: the disk is full or the file cannot be written.
    """
    record = {"version": VERSION, "trajectory": scored.trajectory, "score": scored.score}
    append_line(path, dump_line(record))


def read_trajectories(path: Path) -> ReadResult:
    """The trajectories of a file. A last line that was cut off is named in ``problems``.

    Raises:
        TrajectoryFileError: the file is missing, or a line is damaged or of another version; names file and line.
    """
    records, problems = _read_records(path)
    found: list[ScoredTrajectory] = []
    for number, record in records:
        found.append(_record(ScoredTrajectory, path, number, record))
    return ReadResult(trajectories=tuple(found), problems=problems)


def write_credit(path: Path, all_credit: Iterable[Credit]) -> None:
    """Write the credit of all trajectories of a step, in place of what the file held."""
    lines = (f"{dump_line({'version': VERSION, 'credit': credit})}\n" for credit in all_credit)
    write_atomically(path, "".join(lines))


def read_credit(path: Path) -> dict[str, Credit]:
    """The credit of a step, by trajectory id.

    Raises:
        TrajectoryFileError: the file is missing, or a line is damaged or of another version; names file and line.
    """
    records, problems = _read_records(path)
    if problems:  # it was written in one piece
        raise TrajectoryFileError(f"reading {path}: {problems[0]}.")
    found = [_record(_CreditLine, path, number, record).credit for number, record in records]
    return {credit.trajectory: credit for credit in found}


def append_metrics(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Append one line of metrics.

    Raises:
        RunError: the disk is full or the file cannot be written.
    """
    append_line(path, dump_line({"step": step, **metrics}))


def read_metrics(path: Path) -> tuple[dict[str, float], ...]:
    """The lines of a metrics file in order; none if it is missing, and without a last line that was cut off.

    Raises:
        DataError: another line is damaged.
    """
    if not path.is_file():
        return ()
    lines, _ = _read_lines(path)
    found = []
    for number, line in lines:
        try:
            found.append(dict(decode(Mapping[str, float], line)))  # type: ignore[type-abstract]  # a typing construct as a value
        except ValueError as error:
            raise DataError(f"reading {path}, line {number}: {error}. Remove the line.") from error
    return tuple(found)


def append_line(path: Path, line: str) -> None:
    """Append one line and hand it to the system at once.

    A cut-off line before it is cut away; so is this one if it cannot be written whole.

    Raises:
        RunError: the disk is full or the file cannot be written.
    """
    try:
        with path.open("ab+", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ranks append to one file, and half a line of another is no cut-off line
            end = _end_of_last_line(file.fileno())
            if end < os.fstat(file.fileno()).st_size:
                file.truncate(end)
            try:
                _write_all(file.fileno(), f"{line}\n".encode())
            except OSError:
                with suppress(OSError):  # not every file can be cut; the first error is the one to tell
                    file.truncate(end)
                raise
    except OSError as error:
        raise _write_error(path, error) from error


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, and whoever comes after a crash, finds the old text or the new one and no mixture.

    Raises:
        RunError: the disk is full or the file cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb", buffering=0) as file:
            _write_all(file.fileno(), text.encode())
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise _write_error(path, error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _CreditLine:
    credit: Credit


def _record(kind: type[Any], path: Path, number: int, record: dict[str, object]) -> Any:  # noqa: ANN401  an instance of kind
    version = record.get("version")
    if version not in (1, VERSION):
        raise TrajectoryFileError(
            f"reading {path}, line {number}: found version {version!r}, wanted {VERSION} or 1. "
            f"Read it with the condensegrpo that wrote it."
        )
    try:
        fields = {key: value for key, value in record.items() if key != "version"}
        return decode(kind, converted_from_version_1(fields) if version == 1 else fields)
    except ValueError as error:
        raise TrajectoryFileError(
            f"reading {path}, line {number}: {error}. The file was edited or damaged; remove the line or sample "
            f"the step anew."
        ) from error


def _read_records(path: Path) -> tuple[list[tuple[int, dict[str, object]]], tuple[str, ...]]:
    try:
        lines, problems = _read_lines(path)
    except DataError as error:
        raise TrajectoryFileError(str(error)) from error
    records: list[tuple[int, dict[str, object]]] = []
    for number, line in lines:
        if not isinstance(line, dict):
            raise TrajectoryFileError(f"reading {path}, line {number}: found {type(line).__name__}, wanted an object.")
        records.append((number, line))
    return records, problems


def _read_lines(path: Path) -> tuple[list[tuple[int, object]], tuple[str, ...]]:
    """Numbered JSON values, and what was wrong with a last line that has no newline."""
    try:
        *whole, tail = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"reading {path}: {error.strerror}.") from error
    found: list[tuple[int, object]] = []
    for number, line in enumerate(whole, 1):
        try:
            found.append((number, json.loads(line)))
        except ValueError as error:  # also bytes that are no text
            raise DataError(f"reading {path}, line {number}: not a line of JSON ({error}). Remove the line.") from error
    if not tail:
        return found, ()
    try:
        return [*found, (len(whole) + 1, json.loads(tail))], ()
    except ValueError:
        return found, (
            f"line {len(whole) + 1} is cut off after {len(tail)} bytes, as if the run was interrupted while writing "
            f"it; {len(found)} lines before it were read",
        )


def _end_of_last_line(descriptor: int) -> int:
    """Where the last whole line of a file ends, in bytes."""
    end = os.fstat(descriptor).st_size
    if end == 0 or os.pread(descriptor, 1, end - 1) == b"\n":
        return end
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _write_all(descriptor: int, data: bytes) -> None:
    """Write every byte; the system may take fewer at a time when the disk is nearly full."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _write_error(path: Path, error: OSError) -> RunError:
    if error.errno in _FULL:
        return RunError(
            f"writing {path}: {error.strerror}. Free some space (or raise the quota), then go on with "
            f"`condensegrpo train --resume RUN`; what was written before is whole."
        )
    return RunError(f"writing {path}: {error.strerror}. Check the folder and its permissions.")


def _neighbours(path: Path) -> str:
    """The runs beside a path that is none."""
    parent = path.parent
    runs = (
        sorted(entry.name for entry in parent.iterdir() if (entry / "config.yaml").is_file()) if parent.is_dir() else []
    )
    return f"Runs in {parent}: {', '.join(runs) or 'none'}."
