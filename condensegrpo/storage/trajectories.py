"""Trajectory files: one line for each scored trajectory, appended as it finishes."""

from dataclasses import dataclass
from pathlib import Path

from condensegrpo.core.trajectory import ScoredTrajectory
from condensegrpo.storage.files import append_line
from condensegrpo.storage.records import read_records, record_line


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """The content of a trajectory file."""

    trajectories: tuple[ScoredTrajectory, ...]  # in the order in which they finished
    problems: tuple[str, ...]  # a last line that is cut off and could not be read


def write_trajectory(path: Path, scored: ScoredTrajectory) -> None:
    """Append one trajectory to a file as one line.

    Raises:
        RunError: the disk is full or the file cannot be written.
    """
    append_line(path, record_line({"trajectory": scored.trajectory, "score": scored.score}))


def read_trajectories(path: Path) -> ReadResult:
    """The trajectories of a file. A last line that is cut off is named in ``problems``.

    Raises:
        TrajectoryFileError: the file is missing, or a line is damaged or of another version; names file and line.
    """
    trajectories, problems = read_records(ScoredTrajectory, path)
    return ReadResult(trajectories=tuple(trajectories), problems=problems)
