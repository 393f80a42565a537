"""Export: the model or the adapter of a checkpoint as a folder of its own, once every byte is known to be intact."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from condensegrpo.core.errors import CheckpointError, RunError
from condensegrpo.learner import checkpoint
from condensegrpo.learner.atomic_folder import published_folder
from condensegrpo.storage.run_folder import MANIFEST

Part = Literal["model", "adapter"]  # folders of a checkpoint: a whole Hugging Face folder, and a PEFT folder


def checkpoint_of(path: Path, step: int | None) -> Path:
    """The checkpoint that is meant by a run's folder (its newest, or that of ``step``) or by a checkpoint's own.

    Raises:
        RunError: there is none.
    """
    if (path / MANIFEST).is_file():
        if step is not None:
            raise RunError(
                f"exporting {path}: it is one checkpoint already, and --step {step} was given as well. Leave --step "
                f"out, or name the run's folder."
            )
        return path
    folder = path / "checkpoints"
    steps = checkpoint.steps(folder)
    if not steps:
        raise RunError(
            f"exporting {path}: it is neither a checkpoint (no {MANIFEST}) nor a run that has one (no "
            f"checkpoints/step_…). Give a run's folder such as runs/quickstart, or a step_… folder in it."
        )
    if step is None:
        return checkpoint.latest(folder) or steps[max(steps)]
    if step not in steps:
        raise RunError(
            f"exporting step {step} of {path}: it has no such checkpoint. It has {', '.join(map(str, steps))}."
        )
    return steps[step]


def export_checkpoint(
    source: Path, target: Path, part: Part, describe: Callable[[Path, int], None] = lambda folder, step: None
) -> None:
    """Copy a part of a checkpoint to a new folder, which appears whole or not at all.

    Args:
        describe: writes further files into the folder, before it appears, for the step of the checkpoint.

    Raises:
        RunError: the target is there already, or the checkpoint has no such part.
        CheckpointError: the checkpoint is damaged, or the target cannot be written.
    """
    if target.exists():
        raise RunError(f"exporting to {target}: it is there already, and nothing is overwritten. Give a new name.")
    if not (source / part).is_dir():
        hint = " It trained all weights: leave --adapter out." if part == "adapter" else ""
        raise RunError(f"exporting {source}: it has no {part}/.{hint}")
    manifest = checkpoint.verify(source)
    if not any(name.startswith(f"{part}/") for name in manifest.hashes):
        raise CheckpointError(f"exporting {source}: its {part}/ is not in its manifest. Export another checkpoint.")
    with published_folder(target) as temporary:
        shutil.copytree(source / part, temporary, dirs_exist_ok=True)
        describe(temporary, manifest.step)
