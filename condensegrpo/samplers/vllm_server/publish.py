"""How the learner's weights reach the servers: through a folder of safetensors files, or over NCCL (``nccl.py``).

    own servers       the first rank of a machine writes a folder, the servers of all its ranks load it
    shared servers    the first rank of the run writes a folder, and has all servers load it

Writing is separate from loading: servers sample with the old weights while new ones are written.
"""

import math
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import SamplerError
from condensegrpo.learner.ranks import gather, rank
from condensegrpo.learner.settings import LoraSettings
from condensegrpo.samplers.vllm.weights import write_adapters
from condensegrpo.samplers.vllm_server.pool import ReplicaPool
from condensegrpo.samplers.vllm_server.replica import WeightsLabel

SHARD_BYTES = 2 << 30  # of one file: the memory needed besides the learner's own


def free_bytes(folder: Path) -> int:
    """Free bytes where a folder lies or will lie."""
    existing = next((path for path in (folder, *folder.parents) if path.is_dir()), Path())
    return shutil.disk_usage(existing).free


def check_room(folder: Path, needed: int, free: Callable[[Path], int] = free_bytes) -> None:
    """Check before anything is written that a folder has room: a full /dev/shm ends processes without an error."""
    room = free(folder)
    if room < needed:
        size = math.ceil(needed / 1e9)
        raise SamplerError(
            f"writing weights for the servers into {folder}: found {room / 1e9:.2f} GB free, wanted "
            f"{needed / 1e9:.2f} GB. In a container enlarge /dev/shm (docker run --shm-size={size}g), or set "
            f"sampler.options.server.weights to a folder with enough space that the servers can read."
        )


def write_weights(folder: Path, named_tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    """Write weights into a new folder, file by file; the folder is removed if anything fails."""
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


T = TypeVar("T")
Tensors = Iterator[tuple[str, Tensor]]


def on_ranks(call: Callable[[], T] | None, named_tensors: Iterable[object] = ()) -> list[T | None]:
    """Make this rank's call, if it has one; the results of all ranks. Every rank must call it.

    Args:
        named_tensors: that some ranks' calls read. They are read to the end on every rank, since gathering sharded
            weights takes all of them.
    """
    outcome: T | SamplerError | None = None
    try:
        try:
            outcome = call() if call is not None else None
        finally:
            for _ in named_tensors:
                pass
    except SamplerError as error:
        outcome = error
    results: list[T | None] = []
    for other in gather(outcome):
        if isinstance(other, SamplerError):
            raise other
        results.append(other)
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderPublisher:
    """Writes files into a folder that every server loads. The files of the last update are kept until the end."""

    loop: BackgroundLoop
    folder: Path
    dtype: torch.dtype
    nbytes: int  # of one update
    writer: int = 0  # the rank whose folder this rank's servers load
    loads: bool = True  # this rank has its pool load; False: another rank does, with the same servers
    lora: LoraSettings | None = None  # updates bring adapters; None: all weights
    base: str | None = None  # the folder of the weights below adapters; None: those that the servers start with
    free: Callable[[Path], int] = free_bytes
    _staged: list[WeightsLabel] = field(default_factory=list, init=False)  # written and not loaded

    def check_room(self) -> None:
        """Check that the folder has room for two updates, before the first; every rank must call it."""
        on_ranks(partial(check_room, self.folder, 2 * self.nbytes, self.free) if self._writes else None)

    def stage(self, pool: ReplicaPool, named_tensors: Tensors, label: str) -> Callable[[], None]:
        """Write weights; the call that it returns has the servers load them, and removes those of the update before.

        Servers may still sample while weights are written, not while they are loaded. Every rank must call both, and
        every rank raises what one of them raised.
        """
        write = partial(self._write, pool.weights, named_tensors, label)
        weights = on_ranks(write if self._writes else None, named_tensors)[self.writer]
        assert weights is not None  # that rank writes, or all ranks raise
        return partial(self._load, pool, weights)

    def close(self, pool: ReplicaPool) -> None:
        """Remove the files of the last update, and of one that was not loaded: no server of the pool will load them."""
        for weights in (pool.weights, *self._staged):
            self._remove(weights)

    @property
    def _writes(self) -> bool:
        return rank() == self.writer

    def _write(self, before: WeightsLabel, named_tensors: Tensors, label: str) -> WeightsLabel:
        # two updates lie there for a moment: the first must leave room for the second
        check_room(self.folder, (1 if self._written(before) else 2) * self.nbytes, self.free)
        folder = self.folder / f"{_prefix(label)}{secrets.token_hex(8)}"
        if self.lora is None:
            write_weights(folder, named_tensors, self.dtype)
            staged = WeightsLabel(label=label, folder=str(folder.resolve()))
        else:
            write_adapters(folder, named_tensors, self.lora)
            staged = WeightsLabel(label=label, folder=self.base, adapters=str(folder.resolve()))
        self._staged.append(staged)
        return staged

    def _load(self, pool: ReplicaPool, weights: WeightsLabel) -> None:
        before = pool.weights
        try:
            on_ranks(partial(self.loop.run, pool.load(weights)) if self.loads else None)
        except BaseException:
            self._remove(weights)
            raise
        pool.hold(weights)
        self._staged.clear()
        self._remove(before)

    def _remove(self, weights: WeightsLabel) -> None:
        """Remove the files of an update that this rank wrote."""
        folder = self._written(weights)
        if folder is not None and self._writes:
            shutil.rmtree(folder, ignore_errors=True)

    def _written(self, weights: WeightsLabel) -> Path | None:
        """The folder of an update; None: no update brought the weights. A model may lie beside the updates."""
        path = Path(weights.adapters or weights.folder or "")
        written = path.parent == self.folder.resolve() and path.name.startswith(_prefix(weights.label))
        return path if written else None


def _prefix(label: str) -> str:
    """How the name of the folder of an update begins."""
    return f"{label.replace(':', '-')}-"
