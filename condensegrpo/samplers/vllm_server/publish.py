"""How the learner's weights reach the servers: through a folder of safetensors files, or from GPU to GPU over NCCL.

    own servers       the first rank of a machine writes a folder, the servers of all its ranks load it
    shared servers    the first rank of the run writes a folder, and has all servers load it

Writing is separate from loading: servers sample with the old weights while new ones are written.
"""

import asyncio
import math
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch import Tensor

from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.threads import DaemonThread
from condensegrpo.learner.devices import on_this_device
from condensegrpo.learner.ranks import gather, rank
from condensegrpo.learner.settings import LoraSettings
from condensegrpo.samplers.http_client import Json
from condensegrpo.samplers.vllm.weights import free_bytes, new_folder, write_adapters
from condensegrpo.samplers.vllm_server.pool import Replica, ReplicaPool, WeightsLabel
from condensegrpo.samplers.vllm_server.process import LOOPBACK, free_port

T = TypeVar("T")
Tensors = Iterator[tuple[str, Tensor]]
SHARD_BYTES = 2 << 30  # of one file: the memory needed besides the learner's own


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


def write_weights(folder: Path, named_tensors: Tensors, dtype: torch.dtype) -> None:
    """Write weights into a new folder, file by file; the folder is removed if anything fails."""
    cure = "Set sampler.options.server.weights to a folder with enough space that the servers can read."
    with new_folder(folder, "weights for the servers", cure):
        for number, shard in enumerate(shards(named_tensors, dtype, device="cpu", most=SHARD_BYTES)):
            save_file(shard, folder / f"weights-{number:05d}.safetensors", metadata={"format": "pt"})


def shards(
    named_tensors: Tensors, dtype: torch.dtype, *, device: torch.device | str, most: int
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
    """Writes each update into a folder of its own, which every server loads, and keeps the last one."""

    loop: BackgroundLoop
    folder: Path  # of the updates of this run, and of nothing else
    dtype: torch.dtype
    nbytes: int  # of one update
    writer: int = 0  # the rank whose folder this rank's servers load
    lora: LoraSettings | None = None  # updates bring adapters; None: all weights
    free: Callable[[Path], int] = free_bytes

    @property
    def _writes(self) -> bool:
        return rank() == self.writer

    def check_room(self) -> None:
        """Check that the folder has room for two updates, before the first; every rank must call it."""
        on_ranks(partial(check_room, self.folder, 2 * self.nbytes, self.free) if self._writes else None)

    def stage(self, pool: ReplicaPool, named_tensors: Tensors, label: str) -> Callable[[], None]:
        """Write weights; the call that it returns has the servers load them, and removes those of the update before.

        Servers may still sample while weights are written, not while they are loaded. Every rank must call both, and
        every rank raises what one of them raised.
        """
        write = partial(self._write, named_tensors, label, pool.weights.folder)
        weights = on_ranks(write if self._writes else None, named_tensors)[self.writer]
        assert weights is not None  # that rank writes, or all ranks raise

        def load() -> None:
            try:
                on_ranks(partial(self.loop.run, pool.load(weights)) if pool.gives_weights else None)
                pool.hold(weights)
            finally:
                for path in self.folder.resolve().iterdir() if self._writes else ():
                    if str(path) not in pool.weights:
                        shutil.rmtree(path, ignore_errors=True)

        return load

    def close(self) -> None:
        """Remove all files: no server will load them."""
        if self._writes:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, named_tensors: Tensors, label: str, base: str | None) -> WeightsLabel:
        # two updates lie there for a moment: the first must leave room for the second
        check_room(self.folder, (1 if self.folder.is_dir() else 2) * self.nbytes, self.free)
        folder = self.folder.resolve() / secrets.token_hex(8)
        if self.lora is None:
            write_weights(folder, named_tensors, self.dtype)
            return WeightsLabel(label=label, folder=str(folder))
        write_adapters(folder, named_tensors, self.lora)
        return WeightsLabel(label=label, folder=base, adapters=str(folder))


PART_BYTES = 256 << 20  # sent at once; the learner's GPU holds a part that is sent, and twice the one that is packed
SENT_POLL_SECONDS = 0.001  # between two checks of a GPU's progress


@dataclass(eq=False)
class WeightBroadcast:
    """The learner's end of an NCCL group, on a stream of its own: what the learner computes meanwhile does not wait."""

    communicator: Any  # vLLM's PyNcclCommunicator, untyped
    stream: torch.cuda.Stream

    @classmethod
    def join(cls, meeting: Mapping[str, object]) -> "WeightBroadcast":
        """Join on the current GPU, as rank 0, in a thread of its own: vLLM gives the thread another stream.

        It waits five minutes for the others to connect, and for ever for them in ``ncclCommInitRank``.

        Args:
            meeting: a master's address and port, and the number of ranks.
        """
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        return cls(trainer_init(dict(meeting)), torch.cuda.Stream())  # type: ignore[no-untyped-call]  # torch's

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Start to send a tensor to all other ranks, after the work of the caller's stream, which packed it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        self.communicator.broadcast(tensor, src, stream=self.stream)
        tensor.record_stream(self.stream)

    def sent(self) -> bool:
        """Whether all tensors were sent."""
        return bool(self.stream.query())

    def destroy(self) -> None:
        """Leave the group."""
        self.communicator.destroy()


@dataclass(eq=False)
class NcclPublisher:
    """Sends weights to all running servers from GPU to GPU, in a group that is rebuilt whenever their set changes.

        learner, rank 0 ──broadcast──▶ workers of server 0, ranks 1 … w₀ ── of server 1, ranks w₀+1 … ── …

    Names, types and shapes of each part go over HTTP while its bytes go over NCCL in one broadcast, by the routes of
    vLLM's native weight transfer (packed: ``vllm/distributed/weight_transfer/packed_tensor.py``). The next part is
    gathered and packed while the servers take one.
    """

    loop: BackgroundLoop
    _: KW_ONLY
    seconds: float  # time limit of each call
    dtype: torch.dtype
    join: Callable[[Mapping[str, object]], WeightBroadcast] = WeightBroadcast.join
    part_bytes: int = PART_BYTES  # sent at once; a larger tensor is sent alone
    _wire: WeightBroadcast | None = field(default=None, init=False)
    _members: Sequence[tuple[Replica, int]] = field(default=(), init=False)  # of the group, and how often each joined

    def stage(self, pool: ReplicaPool, named_tensors: Tensors, label: str) -> Callable[[], None]:
        """Return a call that sends the weights to every running server: nothing is sent while servers sample.

        Every rank must call it. It raises a SamplerError where no server runs, or one was started without NCCL.
        """

        def update() -> None:
            send = partial(self._publish, pool, named_tensors, label)
            on_ranks(send if pool.gives_weights else None, named_tensors)
            pool.hold(WeightsLabel(label=label, folder=None))

        return update

    def close(self) -> None:
        """Leave the group, if there is one."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.destroy()

    def _publish(self, pool: ReplicaPool, named_tensors: Tensors, label: str) -> None:
        running = self.loop.run(pool.running())
        if not running:
            raise SamplerError(f"sending the weights {label} over NCCL: none of {len(pool.replicas)} servers answers")
        members = [(replica, replica.joins) for replica in running]
        if self._wire is None or members != self._members:
            self.close()
            self._wire, self._members = self._joined(running), members
        wire, self._wire = self._wire, None  # of an update that fails the members cannot complete it
        self._send(wire, running, named_tensors)
        self._wire = wire
        self.loop.run(_gathered(replica.receive(label) for replica in running))

    def _send(self, wire: WeightBroadcast, replicas: Sequence[Replica], named_tensors: Tensors) -> None:
        """Send weights to every server of the group, in their order."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._on_all(replicas, "start_weight_update").result()
        taking: Future[list[Json]] | None = None
        for part in shards(named_tensors, self.dtype, device=device, most=self.part_bytes):
            packed = torch.cat([tensor.flatten().view(torch.uint8) for tensor in part.values()])
            self._wait_until_taken(taking, wire)
            update = {
                "names": list(part),
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in part.values()],
                "shapes": [list(tensor.shape) for tensor in part.values()],
            }
            taking = self._on_all(replicas, "update_weights", [{"update_info": update}] * len(replicas))
            wire.broadcast(packed, src=0)
        self._wait_until_taken(taking, wire)
        self._on_all(replicas, "finish_weight_update").result()

    def _wait_until_taken(self, taking: "Future[list[Json]] | None", wire: WeightBroadcast) -> None:
        """Wait until the servers have a part and the GPU has sent it, for a bounded time: a peer may have died."""
        if taking is None:
            return
        taking.result()  # the calls have a time limit
        until = time.monotonic() + self.seconds
        while not wire.sent():
            if time.monotonic() > until:
                raise SamplerError(
                    f"sending weights over NCCL: not done within {self.seconds:g} seconds (server.start_seconds). A "
                    f"server has probably died: resume the run."
                )
            time.sleep(SENT_POLL_SECONDS)

    def _on_all(
        self, replicas: Sequence[Replica], step: str, bodies: Sequence[Mapping[str, object]] = ()
    ) -> "Future[list[Json]]":
        """Start a step of vLLM's native weight transfer on every server: ``start_weight_update``, …."""
        calls = [
            each.client.call("POST", f"/{step}", body, self.seconds)
            for each, body in zip_longest(replicas, bodies)  # without bodies: None
        ]
        return self.loop.submit(_gathered(calls))

    def _joined(self, replicas: Sequence[Replica]) -> WeightBroadcast:
        """This end of a new group, which the workers of all servers joined in time."""
        workers = [_workers(replica) for replica in replicas]
        meeting: dict[str, object] = {
            "master_address": address_for(replica.url for replica in replicas),
            "master_port": free_port(),
            "world_size": 1 + sum(workers),
        }
        firsts = accumulate(workers, initial=1)  # the ranks of a server's workers follow those of the servers before it
        packing = {"packed": True, "packed_buffer_size_bytes": self.part_bytes}
        invitations = [
            {"init_info": {**meeting, "rank_offset": first, **packing}}
            for first, _ in zip(firsts, replicas, strict=False)
        ]
        self._on_all(replicas, "shutdown_weight_transfer_engine").result()  # of an earlier group
        joining = self._on_all(replicas, "init_weight_transfer_engine", invitations)
        thread, on_device = DaemonThread("NCCL"), on_this_device()

        def join_here() -> WeightBroadcast:
            on_device()
            return self.join(meeting)

        wire = thread.submit(join_here)
        thread.close()
        calls: list[Future[Any]] = [joining, wire]
        done, _ = wait(calls, timeout=self.seconds, return_when=FIRST_EXCEPTION)
        error = next((future.exception() for future in done if future.exception() is not None), None)
        if error is None and len(done) == 2:
            return wire.result()
        joining.cancel()
        doing = f"joining {len(replicas)} servers over NCCL at {meeting['master_address']}:{meeting['master_port']}: "
        if error is not None:
            raise SamplerError(
                f"{doing}{type(error).__name__}: {error} Servers must reach this address; or set server.weights=folder."
            ) from error
        found = "servers that are ready and a rank that is not" if joining in done else "no answer from a server"
        raise SamplerError(
            f"{doing}found {found} after {self.seconds:g} seconds (server.start_seconds), wanted a group with "
            f"{', '.join(replica.url for replica in replicas)}. Name the network on every machine (NCCL_SOCKET_IFNAME; "
            f"NCCL_DEBUG=INFO says where NCCL stops), give no server the GPU of a rank, or set server.weights=folder. "
            f"Restart servers that the run did not start: they still wait."
        )


async def _gathered(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    return await asyncio.gather(*calls)


def _workers(replica: Replica) -> int:
    """The processes of a server that joins a group, one a GPU."""
    served = replica.description
    if served is None or not served.nccl:
        raise SamplerError(
            f"sending weights to {replica.url} over NCCL: it was started without. Start it with the same "
            f"server.weights=nccl (condensegrpo serve CONFIG), or remove the option here."
        )
    if served.engines > 1:
        raise SamplerError(
            f"sending weights to {replica.url} over NCCL: its {served.engines} data-parallel engines would join the "
            f"group as one. Set server.weights=folder, or start a server for each engine."
        )
    return served.world_size


def address_for(urls: Iterable[str]) -> str:
    """This machine's address for servers: the source address of packets to the first remote one."""
    for url in urls:
        host = urlsplit(url).hostname or ""
        if host in (LOOPBACK, "localhost", "::1"):
            continue
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # vLLM's group has no IPv6
                probe.connect((host, 9))  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise SamplerError(
                f"joining {url} over NCCL: {error}. Give it an address of IPv4, or set server.weights=folder."
            ) from error
    return LOOPBACK
