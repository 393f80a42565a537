"""Checkpoints: everything a run needs to continue bit-equal, published complete or not at all.

checkpoints/
    step_000100/
        manifest.json       size and SHA-256 of every file below, step, world size, ZeRO stage
        state.json          the state of the training loop (``training/checkpoints.py``)
        rng_rank_0.pt       states of the random number generators of a rank and of its device
        train_rank_0.pt     its share of weights that are trained, optimiser, schedule (``training_state.py``)
        model/ adapter/     whatever ``extra`` writes, such as the Hugging Face folder
    step_000150.tmp-4711/   left by a killed process; never read, removed by ``prune``

The newest checkpoint is that of the highest step. Frozen weights, the base under adapters, are not saved again: the
engine that loads a checkpoint has them already, and the manifest says whether they are the same.
"""

import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from condensegrpo.core.errors import CheckpointError, CondenseError
from condensegrpo.learner import devices
from condensegrpo.learner.atomic_folder import publish, remove_leftover, sha256_of, temporary_name, write_errors
from condensegrpo.learner.deepspeed_import import DeepSpeedEngine
from condensegrpo.learner.model_folder import check_weights
from condensegrpo.learner.ranks import any_rank, from_first, on_every_rank, rank, world_size
from condensegrpo.learner.training_state import restore_training_state, training_state
from condensegrpo.learner.weights import fingerprint
from condensegrpo.storage.files import TEMPORARY, is_locked
from condensegrpo.storage.run_folder import MANIFEST

FORMAT = 1  # of the files; a checkpoint of another format is refused
_RNG, _TRAIN, _STATE = "rng_rank_{}.pt", "train_rank_{}.pt", "state.json"
_STEP = re.compile(r"step_\d{6,}")
_OF_RANK = re.compile(r"rank_(\d+)")  # in the path of a file that this rank writes; all others are the first one's


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a checkpoint, and which engine can take it."""

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
    extra: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Write the checkpoint of optimiser step ``step`` now; every rank must call it. See ``save_shards``."""
    return save_shards(engine, folder, step=step, state=state, extra=extra)()


def save_shards(
    engine: DeepSpeedEngine,
    folder: Path,
    *,
    step: int,
    state: Mapping[str, object],
    extra: Callable[[Path], None] = lambda _: None,
    copied: bool = False,
) -> Callable[[], Path]:
    """Collect what the checkpoint of optimiser step ``step`` holds; every rank must call it, and what it returns.

    Args:
        engine: with weights, optimiser and schedule.
        folder: of all checkpoints of the run.
        step: optimiser steps taken; a checkpoint of the same step is replaced.
        state: JSON, what the loop needs to continue; the first rank's is kept.
        extra: writes further files into the folder that it is given; called on every rank. The paths of those that
            another rank than the first one writes hold ``rank_N``.
        copied: to main memory: the checkpoint may then be written by another thread while the engine goes on.

    Returns:
        Writes and publishes the checkpoint, and returns its folder.

        It raises a CheckpointError on every rank if one of them cannot write; the unfinished checkpoint is removed,
        earlier ones are untouched.
    """
    target, policy, stage = folder / f"step_{step:06d}", fingerprint(engine), int(engine.zero_optimization_stage())
    if rank() == 0:
        remove_leftover(temporary_name(target, os.getpid()))
    # The ranks agree on the name and wait for each other: none writes before the first has removed the leftover.
    temporary = temporary_name(target, from_first(os.getpid()))
    device = devices.gpu.get_rng_state() if devices.gpu.is_available() else None  # of this rank's device alone
    generators = {"python": random.getstate(), "torch": torch.get_rng_state(), "device": device}
    trained = training_state(engine)
    if copied:
        trained["pieces"] = {
            name: (start, {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()})
            for name, (start, tensors) in trained["pieces"].items()
        }

    def write_part() -> dict[str, tuple[int, str]]:
        """Write the files of this rank; their sizes and hashes by path."""
        temporary.mkdir(parents=True, exist_ok=True)
        torch.save(generators, temporary / _RNG.format(rank()))
        torch.save(trained, temporary / _TRAIN.format(rank()))
        if rank() == 0:
            (temporary / _STATE).write_text(json.dumps(state), encoding="utf-8")
        extra(temporary)
        return {name: (file.stat().st_size, sha256_of(file)) for name, file in _files_of_rank(temporary)}

    def publish_all(parts: list[dict[str, tuple[int, str]]]) -> None:
        files = {name: file for part in parts for name, file in sorted(part.items())}
        manifest = Manifest(
            format=FORMAT,
            step=step,
            world_size=world_size(),
            zero_stage=stage,
            policy=policy,
            sizes={name: size for name, (size, _) in files.items()},
            hashes={name: digest for name, (_, digest) in files.items()},
        )
        (temporary / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
        publish(temporary, target)

    def write() -> Path:
        try:
            parts = on_every_rank(write_errors(temporary)(write_part), "saving")
            on_every_rank(write_errors(temporary)(lambda: publish_all(parts) if rank() == 0 else None), "saving")
        except CondenseError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return target

    return write


def _files_of_rank(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files in a folder that this rank wrote, with their paths in it; other ranks rename folders meanwhile."""
    for path, _, files in os.walk(folder):  # passes over folders that are gone
        for file in (Path(path, name) for name in files):
            name = file.relative_to(folder).as_posix()
            owner = _OF_RANK.search(name)
            if (int(owner[1]) if owner else 0) == rank():
                yield name, file


def load_checkpoint(engine: DeepSpeedEngine, checkpoint: Path) -> dict[str, Any]:
    """Restore weights, optimiser, schedule and random number generators; every rank must call it.

    The checkpoint may be that of another number of ranks and of another ZeRO stage. A rank whose generators were not
    saved keeps their states. The moments of the optimiser and the number of steps are restored. Learning
    rate, decay and betas stay those that the engine was opened with, so that a resumed run may change them.

    Returns:
        The loop's own state, as it was given to ``save``.
    """
    manifest = on_every_rank(lambda: verify(checkpoint) if rank() == 0 else _complete(checkpoint))[rank()]
    policy = fingerprint(engine)  # every rank must compute it
    if any_rank(rank() == 0 and policy != manifest.policy):
        raise CheckpointError(
            f"loading {checkpoint}: it belongs to another model: names or shapes of weights differ, or the values "
            f"of frozen weights under adapters. Set model.path (and model.lora) to the values the run was started with."
        )
    names = [_TRAIN.format(number) for number in range(manifest.world_size)]
    restore_training_state(engine, [_read(checkpoint / name, mmap=True) for name in names])
    if rank() < manifest.world_size:
        states = _read(checkpoint / _RNG.format(rank()))
        random.setstate(states["python"])
        torch.set_rng_state(states["torch"])
        if states["device"] is not None and devices.gpu.is_available():
            devices.gpu.set_rng_state(states["device"])
    state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    return state


def _read(path: Path, *, mmap: bool = False) -> Any:  # noqa: ANN401  torch.load is untyped
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:  # whose message advises to execute the file
        raise _damaged(path.parent, path.name, "is no file of tensors", "wanted what torch.save writes") from error


def latest(folder: Path) -> Path | None:
    """The checkpoint of the highest step, with every file present at its full size; None if there is none."""
    checkpoint = next(reversed(steps(folder).values()), None)
    if checkpoint is not None:
        _complete(checkpoint)
    return checkpoint


def steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by their steps, in ascending order; whether they are complete is not looked at."""
    named = (path for path in folder.glob("step_*") if _STEP.fullmatch(path.name))
    return {step_of(path): path for path in sorted(named, key=step_of)}


def step_of(checkpoint: Path) -> int:
    """The optimiser steps that a checkpoint had taken, by its name."""
    return int(checkpoint.name.removeprefix("step_"))


def verify(checkpoint: Path, part: str = "") -> Manifest:
    """Compare every file of a part, such as ``model``, with its hash; by default all files."""
    manifest = _complete(checkpoint)
    hashes = {name: value for name, value in manifest.hashes.items() if name.startswith(part)}
    for name, expected in hashes.items():
        digest = sha256_of(checkpoint / name)
        if digest != expected:
            raise _damaged(checkpoint, name, f"its SHA-256 begins {digest[:12]}", f"wanted {expected[:12]}")
    return manifest


def verify_model(folder: Path) -> None:
    """Check that the weights in a model folder are finite, and compare a checkpoint's files with their hashes."""
    if (folder.parent / MANIFEST).is_file():
        verify(folder.parent, f"{folder.name}/")
    check_weights(folder)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints, and what interrupted saves left. Not while another save runs.

    A checkpoint stays while a process that reads it has locked its manifest. Every rank may call it; the first does the
    work.
    """
    if rank() != 0 or not folder.is_dir():
        return
    beyond = [*steps(folder).values()][: -max(keep, 1)]
    old = [checkpoint for checkpoint in beyond if not is_locked(checkpoint / MANIFEST)]
    for path in (*old, *(path for path in folder.iterdir() if TEMPORARY in path.name)):
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise CheckpointError(
                f"removing {path}, which train.keep_checkpoints no longer keeps: {error.strerror}. Check the folder "
                f"and its permissions; the newest checkpoint is whole."
            ) from error


def _complete(checkpoint: Path) -> Manifest:
    """The manifest, after checking that every file is present at its full size."""
    try:
        manifest = Manifest(**json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(checkpoint, MANIFEST, f"cannot be read ({error})", "wanted a manifest") from error
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"reading the checkpoint {checkpoint}: found format {manifest.format}, wanted {FORMAT}: another version of "
            f"condensegrpo saved it. Use that version."
        )
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
        f"remove the folder to resume from the checkpoint before it."
    )
