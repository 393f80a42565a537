"""Copies the policy out of a checkpoint as a Hugging Face folder, or its adapters as a PEFT folder."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from condensegrpo.core.errors import CheckpointError, RunError
from condensegrpo.learner.atomic_folder import published_folder
from condensegrpo.learner.checkpoint import steps, verify
from condensegrpo.learner.model_folder import check_weights
from condensegrpo.storage.run_folder import MANIFEST

PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})  # suffixes of files that run code when loaded
ExportedPart = Literal["model", "adapter"]  # folders of a checkpoint: a whole Hugging Face folder, and a PEFT folder


def checkpoint_of(path: Path, step: int | None) -> Path:
    """The checkpoint that is meant by a run's folder (its newest, or that of ``step``) or by a checkpoint's own."""
    if (path / MANIFEST).is_file():
        if step is not None:
            raise RunError(
                f"exporting {path}: it is one checkpoint already, and --step {step} was given as well. Leave --step "
                f"out, or name the run's folder."
            )
        return path
    saved = steps(path / "checkpoints")
    if not saved:
        raise RunError(
            f"exporting {path}: it is neither a checkpoint (no {MANIFEST}) nor a run that has one (no "
            f"checkpoints/step_…). Give a run's folder such as runs/quickstart, or a step_… folder in it."
        )
    step = max(saved) if step is None else step
    if step not in saved:
        raise RunError(
            f"exporting step {step} of {path}: it has no such checkpoint. It has {', '.join(map(str, saved))}."
        )
    return saved[step]


def export_checkpoint(
    source: Path, target: Path, part: ExportedPart, describe: Callable[[Path, int], None] = lambda folder, step: None
) -> None:
    """Copy a part of a checkpoint to a new folder, which appears whole or not at all.

    Args:
        describe: writes further files into the folder, before it appears, for the step of the checkpoint.
    """
    if target.exists():
        raise RunError(f"exporting to {target}: it is there already, and nothing is overwritten. Give a new name.")
    if not (source / part).is_dir():
        hint = " It trained all weights: leave --adapter out." if part == "adapter" else ""
        raise RunError(f"exporting {source}: it has no {part}/.{hint}")
    manifest = verify(source)
    names = {name.rpartition("/")[2] for name in manifest.hashes if name.startswith(f"{part}/")}
    if found := {path.name for path in (source / part).iterdir()} - names:
        raise CheckpointError(
            f"exporting {source}: {part}/ has {', '.join(sorted(found))}, which its manifest does not name. Remove it, "
            f"or export another checkpoint."
        )
    if unsafe := sorted(name for name in names if Path(name).suffix in PICKLED):
        raise CheckpointError(
            f"exporting {source}: {part}/{unsafe[0]} may hold code, and weights are in safetensors files. Export "
            f"another checkpoint."
        )
    check_weights(source / part)
    with published_folder(target) as temporary:
        shutil.copytree(source / part, temporary, dirs_exist_ok=True)
        describe(temporary, manifest.step)
