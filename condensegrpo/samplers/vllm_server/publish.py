"""How the learner's weights reach the servers: through a folder, or over NCCL (``nccl.py``).

    own servers       the first rank of a machine writes a folder, the servers of all its ranks load it
    shared servers    the first rank of the run writes a folder, and has all servers load it

Writing is separate from loading: servers sample with the old weights while new ones are written.
"""

import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import SamplerError
from condensegrpo.learner.ranks import gather, rank
from condensegrpo.learner.settings import LoraSettings
from condensegrpo.samplers.vllm.weights import write_adapters
from condensegrpo.samplers.vllm_server.pool import ReplicaPool
from condensegrpo.samplers.vllm_server.publish import check_room, free_bytes, write_weights
from condensegrpo.samplers.vllm_server.replica import WeightsLabel

T = TypeVar("T")
Tensors = Iterator[tuple[str, Tensor]]


def on_ranks(call: Callable[[], T] | None, named_tensors: Iterable[object] = ()) -> list[T | None]:
    """Make this rank's call, if it has one; the results of all ranks. Every rank must call it.

    Args:
        named_tensors: that some ranks' calls read. They are read to the end on every rank, since gathering sharded
            weights takes all of them.

    Raises:
        SamplerError: of the first rank whose call raised one.
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
    """Writes files into a folder that every server loads. Those of the last update are kept until the end."""

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
        """Check that the folder has room for two updates, before the first; every rank must call it.

        Raises:
            SamplerError: it has not.
        """
        on_ranks(partial(check_room, self.folder, 2 * self.nbytes, self.free) if self._writes else None)

    def stage(self, pool: ReplicaPool, named_tensors: Tensors, label: str) -> Callable[[], None]:
        """Write weights; the call that it returns has the servers load them, and removes those of the update before.

        Servers may still sample while weights are written, not while they are loaded. Every rank must call both, and
        every rank raises what one of them raised.

        Raises:
            SamplerError: there is no room for the weights, or servers did not take them.
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
