"""Checkpoints: everything a run needs to continue bit-equal, published complete or not at all.

checkpoints/
    latest                  the name of the newest complete checkpoint; written last
    step_000100/
        manifest.json       size and SHA-256 of every file below, step, world size, ZeRO stage
        state.json          the loop's own state, such as the data cursor
        rng_rank_0.pt       states of the random number generators, a file per rank
        engine/             DeepSpeed's: weights that are trained, optimiser, schedule
        model/ adapter/     whatever ``extra`` writes, such as the Hugging Face folder
    step_000150.tmp-4711/   left by a killed process; never read, removed by ``prune``

Frozen weights, the base under adapters, are not saved again: the engine that loads a checkpoint has them already, and
the manifest says whether they are the same.
"""

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from condensegrpo.core.errors import CheckpointError
from condensegrpo.learner.atomic_folder import (
    is_leftover,
    publish,
    remove_leftover,
    sync,
    temporary_folder,
    temporary_name,
)
from condensegrpo.learner.deepspeed_import import without_deprecations, without_output
from condensegrpo.learner.engine import DeepSpeedEngine
from condensegrpo.learner.ranks import any_rank, barrier, rank, sum_over_ranks, world_size
from condensegrpo.learner.weights import fingerprint
from condensegrpo.storage.files import replace_text

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
ENGINE = "engine"
LATEST = "latest"
_STEP = re.compile(r"step_\d{6,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds and which engine can take it."""

    format: int
    step: int  # optimiser steps taken
    world_size: int
    zero_stage: int
    policy: str  # its ``fingerprint``
    sizes: Mapping[str, int]  # path in the checkpoint -> bytes
    hashes: Mapping[str, str]  # path in the checkpoint -> SHA-256, hexadecimal


def save(
    engine: DeepSpeedEngine,
    folder: Path,
    *,
    step: int,
    state: Mapping[str, object],
    extra: Callable[[Path], None] | None = None,
) -> Path:
    """Write the checkpoint of optimiser step ``step``; every rank must call it.

    Args:
        engine: with weights, optimiser and schedule.
        folder: of all checkpoints of the run.
        step: optimiser steps taken; a checkpoint of the same step is replaced.
        state: JSON, what the loop needs to continue; the first rank's is kept.
        extra: writes further files into the folder that it is given; called on every rank.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it cannot be written; the unfinished checkpoint is removed, earlier ones are untouched.
    """
    target = folder / f"step_{step:06d}"
    with temporary_folder(_place_aside(target)) as temporary:
        with without_deprecations():
            engine.save_checkpoint(str(temporary), tag=ENGINE, save_latest=False, exclude_frozen_parameters=True)
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        states = {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}
        torch.save(states, temporary / f"rng_rank_{rank()}.pt")
        if extra is not None:
            extra(temporary)
        policy = fingerprint(engine)
        barrier()  # all ranks have written
        if rank() == 0:
            (temporary / STATE).write_text(json.dumps(state), encoding="utf-8")
            manifest = _manifest(temporary, step=step, zero_stage=engine.zero_optimization_stage(), policy=policy)
            (temporary / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
            publish(temporary, target)
            replace_text(folder / LATEST, target.name)
            sync(folder)
    barrier()  # published
    return target


def load(engine: DeepSpeedEngine, checkpoint: Path) -> dict[str, Any]:
    """Restore weights, optimiser, schedule and random number generators; every rank must call it.

    Of optimiser and schedule, the moments and the number of steps are restored. Learning rate, decay and betas stay
    those that the engine was opened with, so that a resumed run may change them.

    Returns:
        The loop's own state, as it was given to ``save``.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another number of ranks, ZeRO stage or model.
    """
    manifest = verify(checkpoint) if rank() == 0 else _complete(checkpoint)
    saved_by, stage = manifest.world_size, manifest.zero_stage
    wanted = (world_size(), int(engine.zero_optimization_stage()))
    if (saved_by, stage) != wanted:
        raise CheckpointError(
            f"loading {checkpoint}: it was saved by {saved_by} ranks with ZeRO stage {stage}, and this run has "
            f"{wanted[0]} ranks with ZeRO stage {wanted[1]}. Resume with the former (torchrun "
            f"--nproc_per_node {saved_by}, learner.zero_stage={stage}), or start a new run from its exported model."
        )
    policy = fingerprint(engine)  # every rank must compute it
    if any_rank(rank() == 0 and policy != manifest.policy):
        raise CheckpointError(
            f"loading {checkpoint}: it belongs to another model: names or shapes of weights differ, or the values "
            f"of frozen weights under adapters. Set model.path (and model.lora) to the values the run was started with."
        )
    schedule: LambdaLR = engine.lr_scheduler
    rates = list(schedule.base_lrs)
    settings = [{key: group[key] for key in group if key != "params"} for group in schedule.optimizer.param_groups]
    with without_output():
        path, _ = engine.load_checkpoint(str(checkpoint), tag=ENGINE, load_module_strict=False)
    if path is None:
        raise CheckpointError(
            f"loading {checkpoint}: DeepSpeed found nothing in {ENGINE}/. Resume from another checkpoint."
        )
    schedule.base_lrs = rates
    for group, own, rate, part in zip(
        schedule.optimizer.param_groups, settings, rates, schedule.lr_lambdas, strict=True
    ):
        group.update({**own, "lr": rate * part(schedule.last_epoch)})
    states = torch.load(checkpoint / f"rng_rank_{rank()}.pt", weights_only=True)
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state


def latest(folder: Path) -> Path | None:
    """The newest checkpoint, with every file present at its full size; None if none was ever published.

    Raises:
        CheckpointError: the newest is damaged; it is never skipped silently.
    """
    checkpoint = _pointed_to(folder)
    if checkpoint is not None:
        _complete(checkpoint)
    return checkpoint


def steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by their steps, in ascending order; whether they are complete is not looked at."""
    paths = {int(path.name[5:]): path for path in folder.glob("step_*") if _STEP.fullmatch(path.name)}
    return dict(sorted(paths.items()))


def verify(checkpoint: Path) -> Manifest:
    """Compare every file with its hash.

    Raises:
        CheckpointError: a file is missing or differs; the message names it.
    """
    manifest = _complete(checkpoint)
    for name, wanted in manifest.hashes.items():
        digest = _sha256(checkpoint / name)
        if digest != wanted:
            raise _damaged(checkpoint, name, f"its SHA-256 begins {digest[:12]}", f"wanted {wanted[:12]}")
    return manifest


def prune(folder: Path, keep: int) -> None:
    """Remove old and abandoned checkpoints, and what interrupted saves left. Not while another save runs.

    Kept are the ``keep`` newest steps (at least one) up to and including the one that ``latest`` names. Steps beyond it
    belong to a continuation that was abandoned and are removed. If ``latest`` names no existing step, none is removed.

        steps 5 10 12 30, latest 12, keep 2   ─▶   10 12

    Every rank may call it; the first does the work.
    """
    if rank() != 0 or not folder.is_dir():
        return
    existing = list(steps(folder).values())
    newest = _pointed_to(folder)
    end = existing.index(newest) + 1 if newest in existing else None
    kept = existing if end is None else existing[max(0, end - max(keep, 1)) : end]
    leftovers = [path for path in folder.iterdir() if is_leftover(path)]
    for path in (*(step for step in existing if step not in kept), *leftovers):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _place_aside(target: Path) -> Path:
    """The path that all ranks write the checkpoint to before it is published: the same on every rank, still free."""
    if rank() == 0:
        remove_leftover(temporary_name(target, os.getpid()))
    # The ranks agree on the name and wait for each other: none writes before the first has removed the leftover.
    token = int(sum_over_ranks([os.getpid() if rank() == 0 else 0])[0])
    return temporary_name(target, token)


def _pointed_to(folder: Path) -> Path | None:
    """The path that ``latest`` names, whether it exists or not; None if nothing was ever published."""
    pointer = folder / LATEST
    return folder / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None


def _complete(checkpoint: Path) -> Manifest:
    """The manifest, after checking that every file is present at its full size."""
    try:
        manifest = Manifest(**json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(checkpoint, MANIFEST, f"cannot be read ({error})", "wanted a manifest") from error
    if manifest.format != FORMAT:
        raise _damaged(checkpoint, MANIFEST, f"is of format {manifest.format}", f"wanted {FORMAT}")
    for name, size in manifest.sizes.items():
        path = checkpoint / name
        if not path.is_file():
            raise _damaged(checkpoint, name, "is missing", f"wanted {size} bytes")
        if path.stat().st_size != size:
            raise _damaged(checkpoint, name, f"has {path.stat().st_size} bytes", f"wanted {size}")
    return manifest


def _damaged(checkpoint: Path, name: str, found: str, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"reading the checkpoint {checkpoint}: {name} {found}, {wanted}. It is damaged: restore it from a copy, or "
        f"write the name of an older step_… folder into {checkpoint.parent / LATEST} to resume from that."
    )


def _manifest(temporary: Path, *, step: int, zero_stage: int, policy: str) -> Manifest:
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    return Manifest(
        format=FORMAT,
        step=step,
        world_size=world_size(),
        zero_stage=int(zero_stage),
        policy=policy,
        sizes={path.relative_to(temporary).as_posix(): path.stat().st_size for path in files},
        hashes={path.relative_to(temporary).as_posix(): _sha256(path) for path in files},
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
