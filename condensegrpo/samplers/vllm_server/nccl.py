"""Sends the learner's weights from GPU to GPU: one NCCL group of the learner and the workers of every server.

    learner, rank 0 ──broadcast──▶ workers of server 0, ranks 1 … w₀ ── of server 1, ranks w₀+1 … ── …

Names, types and shapes of each part go over HTTP while its bytes go over NCCL in one broadcast, by the routes of vLLM's
native weight transfer (packed: ``vllm/distributed/weight_transfer/packed_tensor.py``). The next part is gathered and
packed while the servers take one.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.threads import DaemonThread
from condensegrpo.learner.devices import on_this_device
from condensegrpo.samplers.vllm_server.client import ServerClient
from condensegrpo.samplers.vllm_server.pool import ReplicaPool
from condensegrpo.samplers.vllm_server.process import LOOPBACK, free_port
from condensegrpo.samplers.vllm_server.publish import on_ranks, shards
from condensegrpo.samplers.vllm_server.replica import Replica, ReplicaState, WeightsLabel

PART_BYTES = 256 << 20  # sent at once; the learner's GPU holds a part that is sent, and twice the one that is packed
POLL_SECONDS = 0.001  # between two checks of a GPU's progress


class ServerMember(NamedTuple):
    """A server of the group."""

    client: ServerClient
    workers: int  # processes, one a GPU


class WeightBroadcast(Protocol):
    """The learner's end of the group."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Start to send a tensor to all other ranks."""

    def sent(self) -> bool:
        """Whether all tensors were sent."""

    def destroy(self) -> None:
        """Leave the group."""


Join = Callable[
    [Mapping[str, object]], WeightBroadcast
]  # of a master's address and port and the number of all ranks; as rank 0


def join_nccl(meeting: Mapping[str, object]) -> WeightBroadcast:
    """Join on the current GPU, as rank 0, in a thread of its own: vLLM gives the thread another stream.

    It waits five minutes for the others to connect, and for ever for them in ``ncclCommInitRank``.
    """
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return _OnSeparateStream(trainer_init(dict(meeting)), torch.cuda.Stream())  # type: ignore[no-untyped-call]  # torch's


@dataclass(frozen=True)
class _OnSeparateStream:
    """vLLM's communicator on a stream of its own: what the learner computes and gathers meanwhile does not wait."""

    communicator: Any  # vLLM's PyNcclCommunicator, untyped
    stream: torch.cuda.Stream

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
class NcclGroup:
    """A group that joins with all workers when it is made. A server that was started again needs a new group."""

    members: Sequence[ServerMember]
    loop: BackgroundLoop  # of the members' clients
    _: KW_ONLY
    seconds: float  # time limit of each call
    device: torch.device  # the learner's, which tensors are sent from
    part_bytes: int  # sent at once; a larger tensor is sent alone
    join: Join = join_nccl

    def __post_init__(self) -> None:
        meeting = {
            "master_address": _address(self.members),
            "master_port": free_port(),
            "world_size": 1 + sum(member.workers for member in self.members),
        }
        self._on_all("shutdown_weight_transfer_engine")  # of an earlier group
        self._wire = self._joined(meeting)

    def send(self, named_tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        """Send these weights to every server, in their order."""
        self._on_all("start_weight_update")
        taking: Future[None] | None = None
        for part in shards(named_tensors, dtype, device=self.device, most=self.part_bytes):
            packed = torch.cat([tensor.flatten().view(torch.uint8) for tensor in part.values()])
            self._until_taken(taking)
            update = {
                "names": list(part),
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in part.values()],
                "shapes": [list(tensor.shape) for tensor in part.values()],
            }
            taking = self.loop.submit(self._all("update_weights", [{"update_info": update}] * len(self.members)))
            self._wire.broadcast(packed, src=0)
        self._until_taken(taking)
        self._on_all("finish_weight_update")

    def leave(self) -> None:
        """Leave the group."""
        self._wire.destroy()

    def _on_all(self, step: str) -> None:
        self.loop.run(self._all(step, [None] * len(self.members)))

    async def _all(self, step: str, bodies: Sequence[Mapping[str, object] | None]) -> None:
        calls: list[Coroutine[Any, Any, None]] = [
            member.client.transfer(step, body, self.seconds) for member, body in zip(self.members, bodies, strict=True)
        ]
        await asyncio.gather(*calls)

    def _joined(self, meeting: Mapping[str, object]) -> WeightBroadcast:
        """This end of the group, which all workers joined in time."""
        where = f"{meeting['master_address']}:{meeting['master_port']}"
        joining = self.loop.submit(
            self._all("init_weight_transfer_engine", list(_invitations(self.members, meeting, self.part_bytes)))
        )
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
        servers = ", ".join(member.client.url for member in self.members)
        if error is not None:
            raise SamplerError(
                f"joining {len(self.members)} servers over NCCL at {where}: {type(error).__name__}: {error} Servers "
                f"must reach this address; or set server.weights=folder."
            ) from error
        found = "servers that are ready and a rank that is not" if joining in done else "no answer from a server"
        raise SamplerError(
            f"joining {len(self.members)} servers over NCCL at {where}: found {found} after {self.seconds:g} seconds "
            f"(server.start_seconds), wanted a group with {servers}. Name the network on every machine "
            f"(NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO says where NCCL stops), give no server the GPU of a rank, or set "
            f"server.weights=folder. Restart servers that the run did not start: they still wait."
        )

    def _until_taken(self, taking: "Future[None] | None") -> None:
        """Wait until the servers have a part and the GPU has sent it, for a bounded time: a peer may have died."""
        if taking is None:
            return
        taking.result()  # the calls have a time limit
        until = time.monotonic() + self.seconds
        while not self._wire.sent():
            if time.monotonic() > until:
                raise SamplerError(
                    f"sending weights over NCCL: not done within {self.seconds:g} seconds (server.start_seconds). A "
                    f"server has probably died: resume the run."
                )
            time.sleep(POLL_SECONDS)


@dataclass(eq=False)
class NcclPublisher:
    """Sends weights to all running servers, in a group that is rebuilt whenever the set of running servers changes."""

    loop: BackgroundLoop
    seconds: float
    dtype: torch.dtype
    sends: bool = True  # False: another rank sends to the same servers
    join: Join = join_nccl
    part_bytes: int = PART_BYTES
    _group: NcclGroup | None = field(default=None, init=False)
    _joins: tuple[tuple[int, int], ...] = field(default=(), init=False)  # index and joins of its servers

    def stage(self, pool: ReplicaPool, named_tensors: Iterator[tuple[str, Tensor]], label: str) -> Callable[[], None]:
        """Return a call that sends the weights to every running server: nothing is sent while servers sample.

        Every rank must call it. It raises a SamplerError where no server runs, one was started without NCCL, or see
        ``NcclGroup``.
        """

        def update() -> None:
            on_ranks(partial(self._send, pool, named_tensors, label) if self.sends else None, named_tensors)
            pool.hold(WeightsLabel(label=label, folder=None))

        return update

    def _send(self, pool: ReplicaPool, named_tensors: Iterator[tuple[str, Tensor]], label: str) -> None:
        running = self.loop.run(_running(pool.replicas))
        if not running:
            raise SamplerError(f"sending the weights {label} over NCCL: none of {len(pool.replicas)} servers answers")
        joins = tuple((replica.index, replica.joins) for replica in running)
        if self._group is None or joins != self._joins:
            self.close()
            name = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
            members = [_member(replica) for replica in running]
            self._group = NcclGroup(
                members,
                self.loop,
                seconds=self.seconds,
                device=torch.device(name),
                part_bytes=self.part_bytes,
                join=self.join,
            )
            self._joins = joins
        try:
            self._group.send(named_tensors, self.dtype)
        except BaseException:
            self._group = None  # its members are in the middle of an update that cannot be completed
            raise
        self.loop.run(_all_receive(running, label))

    def close(self) -> None:
        """Leave the group, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()


async def _running(replicas: Sequence[Replica]) -> list[Replica]:
    """The replicas that have joined and answer now."""
    up = [replica for replica in replicas if replica.state is not ReplicaState.DOWN]
    answers = await asyncio.gather(*(replica.client.healthy() for replica in up))
    for replica, answers_now in zip(up, answers, strict=True):
        if not answers_now:
            replica.fail("it does not answer")
    return [replica for replica, answers_now in zip(up, answers, strict=True) if answers_now]


async def _all_receive(replicas: Sequence[Replica], label: str) -> None:
    await asyncio.gather(*(replica.receive(label) for replica in replicas))


def _member(replica: Replica) -> ServerMember:
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
    return ServerMember(client=replica.client, workers=served.world_size)


def _invitations(
    members: Sequence[ServerMember], meeting: Mapping[str, object], part_bytes: int
) -> Iterator[dict[str, object]]:
    """The settings of the group for each server: its workers' ranks follow those of the servers before it."""
    first = 1
    for member in members:
        packing = {"packed": True, "packed_buffer_size_bytes": part_bytes}
        yield {"init_info": {**meeting, "rank_offset": first, **packing}}
        first += member.workers


def _address(members: Sequence[ServerMember]) -> str:
    """This machine's address for the servers: the source address of packets to the first remote server."""
    for member in members:
        host = urlsplit(member.client.url).hostname or ""
        if host in (LOOPBACK, "localhost", "::1"):
            continue
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # vLLM's group has no IPv6
                probe.connect((host, 9))  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise SamplerError(
                f"joining {member.client.url} over NCCL: {error}. Give it an address of IPv4, or set "
                f"server.weights=folder."
            ) from error
    return LOOPBACK
