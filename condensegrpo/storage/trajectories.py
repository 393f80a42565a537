"""The files of a step: a line for each scored trajectory, appended as it finishes, and one for the credit of each."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from condensegrpo.core.errors import DataError, TrajectoryFileError
from condensegrpo.core.scored_trajectory import ScoredTrajectory, TrajectoryStats
from condensegrpo.core.trajectory import Score, Trajectory
from condensegrpo.storage.codec import decode, dump_line
from condensegrpo.storage.files import append_line, read_lines, write_atomically
from condensegrpo.storage.stored_trajectory import restore, stored

VERSION = 1  # of the lines

T = TypeVar("T")


def record_line(fields: Mapping[str, object]) -> str:
    """One line of a file, without its newline."""
    return dump_line({"version": VERSION, **fields})


def read_records(kind: type[T], path: Path) -> tuple[list[T], tuple[str, ...]]:
    """A value of the dataclass ``kind`` for every line, and what is wrong with a cut-off last line."""
    try:
        lines, problems = read_lines(path)
    except DataError as error:
        raise TrajectoryFileError(str(error)) from error
    return [read_record(kind, line, f"reading {path}, line {number}") for number, line in lines], problems


def read_record(kind: type[T], line: object, doing: str) -> T:
    """A value of the dataclass ``kind`` for the parsed JSON of one line."""
    if not isinstance(line, dict):
        raise TrajectoryFileError(f"{doing}: found {type(line).__name__}, wanted an object.")
    fields = {key: value for key, value in line.items() if key != "version"}
    if line.get("version") != VERSION:
        raise TrajectoryFileError(
            f"{doing}: found version {line.get('version')!r}, wanted {VERSION}. Read it with the condensegrpo that "
            f"wrote it."
        )
    try:
        if isinstance(trajectory := fields.get("trajectory"), dict):
            restore(trajectory)
        return decode(kind, fields)
    except ValueError as error:
        raise TrajectoryFileError(
            f"{doing}: {error}. The file was edited or damaged; remove the line or sample the step again."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a trajectory was sampled for and with: the same for all of a file, on every line of it."""

    evaluation: str | None  # its name, held-out or that of a variant; None: a training batch
    step: int | None  # optimiser step that the batch is for, or that the evaluated policy has taken; None: not known
    model: str  # folder or Hub id that was loaded; in training its weights are those of Turn.policy_version
    condenser: str
    max_context_tokens: int  # the budget of a prompt, rollout.limits.max_context_tokens
    temperature: float  # 0: greedy
    seed: int  # of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """The content of a trajectory file."""

    trajectories: tuple[ScoredTrajectory, ...]  # in the order in which they finished
    provenance: Provenance | None  # of the last one; None: it was not given
    problems: tuple[str, ...]  # a last line that is cut off and could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrajectoryLine:
    trajectory: Trajectory
    score: Score
    figures: TrajectoryStats
    provenance: Provenance | None = None

    @property
    def scored(self) -> ScoredTrajectory:
        return ScoredTrajectory(trajectory=self.trajectory, score=self.score, figures=self.figures)


def write_trajectory(path: Path, scored: ScoredTrajectory, provenance: Provenance | None = None) -> None:
    """Append one trajectory to a file as one line."""
    trajectory = stored(scored.trajectory)
    line = {"provenance": provenance, "figures": scored.figures, "trajectory": trajectory, "score": scored.score}
    append_line(path, record_line(line))


def read_trajectories(path: Path) -> ReadResult:
    """The trajectories of a file. A last line that is cut off is named in ``problems``."""
    lines, problems = read_records(_TrajectoryLine, path)
    return ReadResult(
        trajectories=tuple(line.scored for line in lines),
        provenance=lines[-1].provenance if lines else None,
        problems=problems,
    )


def read_trajectory(path: Path, line: bytes, number: int) -> tuple[ScoredTrajectory, Provenance | None]:
    """The trajectory of one line of a file, with what it was sampled with; ``number`` counts the lines from 1."""
    doing = f"reading {path}, line {number}"
    try:
        parsed = json.loads(line)
    except ValueError as error:
        raise TrajectoryFileError(f"{doing}: not a line of JSON ({error}). Remove the line.") from error
    read = read_record(_TrajectoryLine, parsed, doing)
    return read.scored, read.provenance


def sample_trajectories(path: Path, count: int) -> list[ScoredTrajectory]:
    """At most ``count`` trajectories, evenly over a file: they stand in the order in which they finished."""
    try:
        *complete, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TrajectoryFileError(f"reading {path}: {error.strerror}.") from error
    numbers = sorted({index * len(complete) // count for index in range(count)}) if complete else []
    return [read_trajectory(path, complete[number], number + 1)[0] for number in numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditTerm:
    """What an advantage is the sum of: one value for all turns, or one a turn; null where a turn does not have it."""

    name: str  # as in the estimator's formula
    values: tuple[float | None, ...]  # (1,) or (K,)
    numbers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # that it comes from, by name; (1,) or (K,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What each turn of one trajectory was trained with."""

    trajectory: str  # Trajectory.id
    advantages: tuple[float, ...]  # (K,) of every trained token of the turn
    weights: tuple[float, ...]  # (K,) of one trained token of the turn in the optimiser step; 0.0: not trained
    handling: Literal["train", "mask", "penalise", "drop"] = "train"  # by its stop; drop: by dynamic sampling
    terms: tuple[CreditTerm, ...] = ()  # that the advantages are the sum of, before whitening; empty: none were given

    def __post_init__(self) -> None:
        if len(self.advantages) != len(self.weights):
            raise ValueError(
                f"credit needs one weight per advantage: {len(self.advantages)} advantages, {len(self.weights)} weights"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CreditLine:
    credit: Credit


def write_credit(path: Path, step: Iterable[Credit]) -> None:
    """Write the credit of all trajectories of a step; replaces the file."""
    write_atomically(path, "".join(f"{record_line({'credit': credit})}\n" for credit in step))


def read_credit(path: Path) -> dict[str, Credit]:
    """The credit of a step, by trajectory id."""
    lines, problems = read_records(_CreditLine, path)
    if problems:  # the file is written at once, so no line may be cut off
        raise TrajectoryFileError(f"reading {path}: {problems[0]}.")
    return {line.credit.trajectory: line.credit for line in lines}
