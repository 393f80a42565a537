"""Trajectory files: one line for each scored trajectory, appended as it finishes."""

import json
from dataclasses import dataclass
from pathlib import Path

from condensegrpo.core.errors import TrajectoryFileError
from condensegrpo.core.scored_trajectory import ScoredTrajectory, TrajectoryFigures
from condensegrpo.core.trajectory import Score, Trajectory
from condensegrpo.storage.files import append_line
from condensegrpo.storage.records import read_record, read_records, record_line
from condensegrpo.storage.stored_trajectory import stored


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
    figures: TrajectoryFigures
    provenance: Provenance | None = None

    @property
    def scored(self) -> ScoredTrajectory:
        return ScoredTrajectory(trajectory=self.trajectory, score=self.score, figures=self.figures)


def write_trajectory(path: Path, scored: ScoredTrajectory, provenance: Provenance | None = None) -> None:
    """Append one trajectory to a file as one line.

    Raises:
        RunError: the disk is full or the file cannot be written.
    """
    trajectory = stored(scored.trajectory)
    line = {"provenance": provenance, "figures": scored.figures, "trajectory": trajectory, "score": scored.score}
    append_line(path, record_line(line))


def read_trajectories(path: Path) -> ReadResult:
    """The trajectories of a file. A last line that is cut off is named in ``problems``.

    Raises:
        TrajectoryFileError: the file is missing, or a line is damaged or of another version; names file and line.
    """
    lines, problems = read_records(_TrajectoryLine, path)
    return ReadResult(
        trajectories=tuple(line.scored for line in lines),
        provenance=lines[-1].provenance if lines else None,
        problems=problems,
    )


def read_trajectory(path: Path, line: bytes, number: int) -> tuple[ScoredTrajectory, Provenance | None]:
    """The trajectory of one line of a file, with what it was sampled with; ``number`` counts the lines from 1.

    Raises:
        TrajectoryFileError: the line is damaged or of another version; names file and line.
    """
    doing = f"reading {path}, line {number}"
    try:
        parsed = json.loads(line)
    except ValueError as error:
        raise TrajectoryFileError(f"{doing}: not a line of JSON ({error}). Remove the line.") from error
    read = read_record(_TrajectoryLine, parsed, doing)
    return read.scored, read.provenance


def sample_trajectories(path: Path, count: int) -> list[ScoredTrajectory]:
    """At most ``count`` trajectories, evenly over a file: they stand in the order in which they finished.

    Raises:
        TrajectoryFileError: the file is missing, or one of these lines is damaged.
    """
    try:
        *complete, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TrajectoryFileError(f"reading {path}: {error.strerror}.") from error
    numbers = sorted({index * len(complete) // count for index in range(count)}) if complete else []
    return [read_trajectory(path, complete[number], number + 1)[0] for number in numbers]
