"""Prefetched batches as files of a checkpoint: a resumed run trains on what it would have trained on.

ahead/rank_0/step_000021/kept.jsonl  masked.jsonl  dropped.jsonl     as in trajectories/, in the order of the batch
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path

from condensegrpo.core.errors import CheckpointError
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.learner import ranks
from condensegrpo.storage.trajectories import read_trajectories, write_trajectory
from condensegrpo.training.rollout_step import StepBatch

FOLDER = "ahead"
FILES = ("kept", "masked", "dropped")  # fields of StepBatch


def write_batches(checkpoint: Path, batches: Mapping[int, StepBatch]) -> None:
    """Write this rank's part of batches, by step, into the folder of a checkpoint."""
    for step, batch in batches.items():
        folder = _folder(checkpoint) / f"step_{step:06d}"
        folder.mkdir(parents=True)
        for name, trajectories in zip(FILES, (batch.kept, batch.masked, batch.dropped), strict=True):
            for scored in trajectories:
                write_trajectory(folder / f"{name}.jsonl", scored)


def read_batches(checkpoint: Path) -> dict[int, StepBatch]:
    """This rank's part of the batches that ``write_batches`` wrote, by step; empty if the checkpoint has none.

    If another number of ranks wrote them, their groups are distributed as ``BatchRollout`` distributes them.

    Raises:
        CheckpointError: a file ends in half a line.
        TrajectoryFileError: a file is damaged or of another version.
    """
    writers = len([*(checkpoint / FOLDER).glob("rank_*")])
    if writers == ranks.world_size():
        return _read_part(_folder(checkpoint))
    parts = [_read_part(checkpoint / FOLDER / f"rank_{number}") for number in range(writers)]
    steps = sorted({step for part in parts for step in part})
    return {step: _groups_of_rank([part[step] for part in parts if step in part]) for step in steps}


def _read_part(folder: Path) -> dict[int, StepBatch]:
    return {
        int(each.name.removeprefix("step_")): StepBatch(*(_read(each / f"{name}.jsonl") for name in FILES))
        for each in sorted(folder.glob("step_*"))
    }


def _groups_of_rank(parts: Sequence[StepBatch]) -> StepBatch:
    """This rank's groups of a batch, in the order of their problems."""
    batch = reduce(add, parts)
    indices = sorted({_problem_index(scored) for scored in batch.trajectories})
    chosen = frozenset(indices[ranks.rank() :: ranks.world_size()])
    kept = (
        tuple(sorted((scored for scored in each if _problem_index(scored) in chosen), key=_problem_index))
        for each in (batch.kept, batch.masked, batch.dropped)
    )
    return StepBatch(*kept)


def _problem_index(scored: ScoredTrajectory) -> int:
    """The index of the problem in its step: 12 of the group 6/12."""
    return int(scored.trajectory.group_id.rpartition("/")[2])


def restore_batches(
    checkpoint: Path,
    *,
    settings: object,
    stored_settings: object,
    last_step: int,
    say: Callable[[str], None],
) -> dict[int, StepBatch]:
    """The batches of a checkpoint that this run would have sampled the same way; none if its settings changed.

    Args:
        settings: the run's ``rollout_settings``.
        stored_settings: those that the batches were sampled with.
        last_step: later batches are left out.
    """
    batches = read_batches(checkpoint)
    if batches and settings != stored_settings:
        say("prefetched trajectories are discarded: the configuration of the rollouts was changed")
        return {}
    return {step: batch for step, batch in batches.items() if step <= last_step}


def _folder(checkpoint: Path) -> Path:
    return checkpoint / FOLDER / f"rank_{ranks.rank()}"


def _read(path: Path) -> tuple[ScoredTrajectory, ...]:
    if not path.is_file():
        return ()
    read = read_trajectories(path)
    if read.problems:
        raise CheckpointError(f"reading {path}: {read.problems[0]}. Resume from another checkpoint.")
    return read.trajectories
