"""How the learner's weights reach the servers: through a folder, or over NCCL (``nccl.py``); by one rank for all."""

import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols import NamedTensors
from condensegrpo.learner.ranks import from_first, rank
from condensegrpo.learner.settings import LoraSettings
from condensegrpo.samplers.vllm.adapters import write_adapters
from condensegrpo.samplers.vllm_server.pool import ReplicaPool
from condensegrpo.samplers.vllm_server.replica import WeightsLabel
from condensegrpo.samplers.vllm_server.weights import check_room, free_bytes, write_weights


@dataclass(frozen=True, slots=True)
class FolderPublisher:
    """Writes files into a folder that every server loads. The files of the last update are kept."""

    loop: BackgroundLoop
    folder: Path
    dtype: torch.dtype
    nbytes: int  # of one update
    lora: LoraSettings | None = None  # updates bring adapters; None: all weights
    base: str | None = None  # the folder of the weights below adapters; None: those that the servers start with
    free: Callable[[Path], int] = free_bytes

    def publish(self, pool: ReplicaPool, named_tensors: Iterator[tuple[str, Tensor]], label: str) -> WeightsLabel:
        """Write weights, have the servers load them, and remove those of the update before.

        Raises:
            SamplerError: the folder has no room or cannot be written, a server refused, or no server is left.
        """
        before = pool.weights.adapters or pool.weights.folder
        written = before is not None and Path(before).parent == self.folder.resolve()
        # two updates lie there for a moment: the first must leave room for the second
        check_room(self.folder, self.nbytes if written else 2 * self.nbytes, self.free)
        folder = self.folder / f"{label.replace(':', '-')}-{secrets.token_hex(2)}"
        if self.lora is None:
            write_weights(folder, named_tensors, self.dtype)
            weights = WeightsLabel(label=label, folder=str(folder.resolve()))
        else:
            write_adapters(folder, named_tensors, self.lora)
            weights = WeightsLabel(label=label, folder=self.base, adapters=str(folder.resolve()))
        try:
            self.loop.run(pool.load(weights))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if before is not None and written:
            shutil.rmtree(before, ignore_errors=True)
        return weights

    def close(self) -> None:
        """There is nothing to free."""


def publish_on_first_rank(publish: Callable[[], WeightsLabel], named_tensors: NamedTensors) -> WeightsLabel:
    """Call ``publish`` on the first rank of several that share the servers; every rank returns or raises its outcome.

    Args:
        named_tensors: read to the end on every rank, since gathering sharded weights takes all of them.
    """
    outcome: WeightsLabel | SamplerError | None = None
    if rank() == 0:
        try:
            outcome = publish()
        except SamplerError as error:
            outcome = error
    for _ in named_tensors:
        pass
    outcome = from_first(outcome)
    if isinstance(outcome, SamplerError):
        raise outcome
    if outcome is None:
        raise SamplerError("updating the servers' weights: the first rank sent no result; see its log")
    return outcome
