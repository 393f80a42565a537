"""Writes the learner's weights as safetensors files, which servers load."""

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from condensegrpo.core.errors import SamplerError

SHARD_BYTES = 2 << 30  # of one file: the memory needed besides the learner's own


def free_bytes(folder: Path) -> int:
    """Free bytes where a folder lies or will lie."""
    existing = next((path for path in (folder, *folder.parents) if path.is_dir()), Path())
    return shutil.disk_usage(existing).free


def check_room(folder: Path, needed: int, free: Callable[[Path], int] = free_bytes) -> None:
    """Check before anything is written that a folder has room: a full /dev/shm ends processes without an error.

    Raises:
        SamplerError: it has not; the message has the sizes.
    """
    room = free(folder)
    if room < needed:
        size = math.ceil(needed / 1e9)
        raise SamplerError(
            f"writing weights for the servers into {folder}: found {room / 1e9:.2f} GB free, wanted "
            f"{needed / 1e9:.2f} GB. In a container enlarge /dev/shm (docker run --shm-size={size}g), or set "
            f"sampler.options.server.weights to a folder with enough space that the servers can read."
        )


def write_weights(folder: Path, named_tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    """Write weights into a new folder, file by file; the folder is removed if anything fails.

    Raises:
        SamplerError: the folder cannot be written (the message has the free space).
    """
    try:
        folder.mkdir(parents=True)
        for number, shard in enumerate(shards(named_tensors, dtype, device="cpu", most=SHARD_BYTES)):
            save_file(shard, folder / f"weights-{number:05d}.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        free = shutil.disk_usage(folder.parent).free / 1e9 if folder.parent.is_dir() else 0.0
        raise SamplerError(
            f"writing weights for the servers into {folder}: {type(error).__name__}: {error}; {free:.2f} GB are free. "
            f"Set sampler.options.server.weights to a folder with enough space that the servers can read."
        ) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def shards(
    named_tensors: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
    *,
    device: torch.device | str,
    most: int,
) -> Iterator[dict[str, Tensor]]:
    """Copies of the tensors on a device, in order, in shards of one type and at most ``most`` bytes, or one tensor."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        sent = dtype if tensor.is_floating_point() else tensor.dtype
        copy = tensor.detach().to(device, sent, copy=True, memory_format=torch.contiguous_format)
        if shard and (size + copy.nbytes > most or copy.dtype != next(iter(shard.values())).dtype):
            yield shard
            shard, size = {}, 0
        shard[name] = copy
        size += copy.nbytes
    yield shard
