"""Batches sampled ahead, as files of a checkpoint: a run that goes on trains on what it would have trained on.

ahead/rank_0/step_000021/kept.jsonl  masked.jsonl  dropped.jsonl     as in trajectories/, in the order of the batch
"""

from collections.abc import Mapping
from pathlib import Path

from condensegrpo.core.errors import CheckpointError
from condensegrpo.core.trajectory import ScoredTrajectory
from condensegrpo.learner import ranks
from condensegrpo.storage.run_folder import read_trajectories, write_trajectory
from condensegrpo.training.rig import Rig
from condensegrpo.training.rollout_step import Sampled, sampled_by

FOLDER = "ahead"
FATES = ("kept", "masked", "dropped")


def write_batches(checkpoint: Path, batches: Mapping[int, Sampled]) -> None:
    """Write this rank's share of batches, by step, into the folder of a checkpoint."""
    for step, sampled in batches.items():
        folder = _folder(checkpoint) / f"step_{step:06d}"
        folder.mkdir(parents=True)
        for fate, some in zip(FATES, (sampled.kept, sampled.masked, sampled.dropped), strict=True):
            for one in some:
                write_trajectory(folder / f"{fate}.jsonl", one)


def read_batches(checkpoint: Path) -> dict[int, Sampled]:
    """What ``write_batches`` wrote on this rank; a checkpoint without any has none.

    Raises:
        CheckpointError: a file ends in half a line.
        TrajectoryFileError: a file is damaged or of another version.
    """
    folders = sorted(_folder(checkpoint).glob("step_*"))
    return {
        int(folder.name.removeprefix("step_")): Sampled(*(_read(folder, fate) for fate in FATES)) for folder in folders
    }


def restored(rig: Rig, checkpoint: Path, made_by: object) -> dict[int, Sampled]:
    """The batches of a checkpoint that this configuration would have sampled so; of any other it has none.

    Args:
        made_by: what ``sampled_by`` said of the configuration that sampled them.
    """
    batches = read_batches(checkpoint)
    if batches and made_by != sampled_by(rig.config):
        rig.observer.say("what was sampled ahead is thrown away: the configuration of the rollouts was changed")
        return {}
    return {step: sampled for step, sampled in batches.items() if step <= rig.config.train.steps}


def _folder(checkpoint: Path) -> Path:
    return checkpoint / FOLDER / f"rank_{ranks.rank()}"


def _read(folder: Path, fate: str) -> tuple[ScoredTrajectory, ...]:
    path = folder / f"{fate}.jsonl"
    if not path.is_file():
        return ()
    read = read_trajectories(path)
    if read.problems:
        raise CheckpointError(f"reading {path}: {read.problems[0]}. Resume from another checkpoint.")
    return read.trajectories
