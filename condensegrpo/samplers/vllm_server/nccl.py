"""Sends the learner's weights from GPU to GPU: one NCCL group of the learner and the workers of every server.

    learner, rank 0 ──broadcast──▶ workers of server 0, ranks 1 … w₀ ── of server 1, ranks w₀+1 … ── …

Names, types and shapes of each part go over HTTP while its bytes go over NCCL in one broadcast, by the routes of vLLM's
native weight transfer (packed: ``vllm/distributed/weight_transfer/packed_tensor.py``).
"""

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import SamplerError
from condensegrpo.samplers.vllm_server.client import ServerClient
from condensegrpo.samplers.vllm_server.pool import ReplicaPool
from condensegrpo.samplers.vllm_server.process import LOOPBACK, free_port
from condensegrpo.samplers.vllm_server.replica import Replica, ReplicaState, WeightsLabel
from condensegrpo.samplers.vllm_server.weights import shards

PART_BYTES = 512 << 20  # sent at once; the learner's GPU holds a part twice while it is packed
POLL_SECONDS = 0.001  # between two checks of a GPU's progress


class Member(NamedTuple):
    """A server of the group."""

    client: ServerClient
    workers: int  # processes, one a GPU


class Wire(Protocol):
    """The learner's end of the group."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Start to send a tensor to all other ranks."""

    def destroy(self) -> None:
        """Leave the group."""


Join = Callable[[Mapping[str, object]], Wire]  # of a master's address and port and the number of all ranks; as rank 0


def join_nccl(meeting: Mapping[str, object]) -> Wire:
    """Join on the current GPU, as rank 0; waits for the others, five minutes at most."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    # vLLM gives the thread another stream: the caller's is restored
    with torch.cuda.stream(torch.cuda.current_stream()):
        return _OnCurrentStream(trainer_init(dict(meeting)))


@dataclass(frozen=True)
class _OnCurrentStream:
    """vLLM's communicator on the caller's stream, which packed the bytes; by default it would use another stream."""

    communicator: Any  # vLLM's PyNcclCommunicator, untyped

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Start to send a tensor to all other ranks."""
        self.communicator.broadcast(tensor, src, stream=torch.cuda.current_stream())

    def destroy(self) -> None:
        """Leave the group."""
        self.communicator.destroy()


class NcclGroup:
    """A joined group. A restarted server is in no group: create another group then."""

    def __init__(
        self,
        members: Sequence[Member],
        loop: BackgroundLoop,
        *,
        seconds: float,
        device: torch.device,
        part_bytes: int,
        join: Join = join_nccl,
    ) -> None:
        """Join with all workers.

        Args:
            loop: of the members' clients.
            seconds: time limit of each call.
            device: the learner's, which tensors are sent from.
            part_bytes: sent at once; a larger tensor is sent alone.

        Raises:
            SamplerError: a server cannot be reached, or refuses.
        """
        self._members = members
        self._loop = loop
        self._seconds = seconds
        self._device = device
        self._part_bytes = part_bytes
        meeting = {
            "master_address": _address(members),
            "master_port": free_port(),
            "world_size": 1 + sum(member.workers for member in members),
        }
        self._on_all("shutdown_weight_transfer_engine")  # of an earlier group
        joining = loop.submit(
            self._all("init_weight_transfer_engine", list(_invitations(members, meeting, part_bytes)))
        )
        try:
            self._wire = join(meeting)
        except Exception as error:  # the boundary to NCCL
            joining.cancel()
            raise SamplerError(
                f"joining {len(members)} servers over NCCL at {meeting['master_address']}:{meeting['master_port']}: "
                f"{type(error).__name__}: {error} Servers must reach this address; or set server.weights=folder."
            ) from error
        joining.result(timeout=seconds)

    def send(self, named_tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        """Send these weights to every server, in their order.

        Raises:
            SamplerError: a server cannot be reached, refuses, or exceeds its time limit. It is then in the middle of
                an update and needs a restart.
        """
        self._on_all("start_weight_update")
        for part in shards(named_tensors, dtype, device=self._device, most=self._part_bytes):
            taking = self._loop.submit(
                self._all("update_weights", [{"update_info": _described(part)}] * len(self._members))
            )
            packed = torch.cat([tensor.flatten().view(torch.uint8) for tensor in part.values()])
            self._wire.broadcast(packed, src=0)
            taking.result(timeout=self._seconds)
            self._until_sent()
        self._on_all("finish_weight_update")

    def leave(self) -> None:
        """Leave the group."""
        self._wire.destroy()

    def _on_all(self, step: str) -> None:
        self._loop.run(self._all(step, [None] * len(self._members)))

    async def _all(self, step: str, bodies: Sequence[Mapping[str, object] | None]) -> None:
        calls: list[Coroutine[Any, Any, None]] = [
            member.client.transfer(step, body, self._seconds)
            for member, body in zip(self._members, bodies, strict=True)
        ]
        await asyncio.gather(*calls)

    def _until_sent(self) -> None:
        """Wait until the GPU has sent the tensors, for a bounded time: a dead peer would block it forever."""
        if self._device.type != "cuda":
            return
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch left it untyped
        sent.record()
        until = time.monotonic() + self._seconds
        while not sent.query():  # type: ignore[no-untyped-call]  # as above
            if time.monotonic() > until:
                raise SamplerError(
                    f"sending weights over NCCL: not done within {self._seconds:g} seconds (server.start_seconds). A "
                    f"server has probably died: resume the run."
                )
            time.sleep(POLL_SECONDS)


@dataclass(eq=False)
class NcclPublisher:
    """Sends weights to all running servers, in a group that is rebuilt whenever the set of running servers changes."""

    loop: BackgroundLoop
    seconds: float
    dtype: torch.dtype
    join: Join = join_nccl
    part_bytes: int = PART_BYTES
    _group: NcclGroup | None = field(default=None, init=False)
    _revivals: tuple[tuple[int, int], ...] = field(default=(), init=False)  # index and revivals of its servers

    def publish(self, pool: ReplicaPool, named_tensors: Iterator[tuple[str, Tensor]], label: str) -> WeightsLabel:
        """Send these weights to every running server.

        Raises:
            SamplerError: no server runs, one was started without NCCL, or see ``NcclGroup``.
        """
        running = self.loop.run(_running(pool.replicas))
        if not running:
            raise SamplerError(f"sending the weights {label} over NCCL: none of {len(pool.replicas)} servers answers")
        revivals = tuple((replica.index, replica.revivals) for replica in running)
        if self._group is None or revivals != self._revivals:
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
            self._revivals = revivals
        try:
            self._group.send(named_tensors, self.dtype)
        except BaseException:
            self._group = None  # its members are in the middle of an update that cannot be completed
            raise
        self.loop.run(_all_receive(running, label))
        return WeightsLabel(label=label, folder=None)

    def close(self) -> None:
        """Leave the group, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()


async def _running(replicas: Sequence[Replica]) -> list[Replica]:
    """The replicas that were brought up and answer now."""
    up = [replica for replica in replicas if replica.state is not ReplicaState.DOWN]
    answers = await asyncio.gather(*(replica.client.healthy() for replica in up))
    for replica, answers_now in zip(up, answers, strict=True):
        if not answers_now:
            replica.fail("it does not answer")
    return [replica for replica, answers_now in zip(up, answers, strict=True) if answers_now]


async def _all_receive(replicas: Sequence[Replica], label: str) -> None:
    await asyncio.gather(*(replica.receive(label) for replica in replicas))


def _member(replica: Replica) -> Member:
    served = replica.description
    if served is None or not served.nccl:
        raise SamplerError(
            f"sending weights to {replica.url} over NCCL: it was started without. Start it with the same "
            f"server.weights=nccl (condensegrpo serve CONFIG), or remove the option here."
        )
    return Member(client=replica.client, workers=served.world_size)


def _invitations(
    members: Sequence[Member], meeting: Mapping[str, object], part_bytes: int
) -> Iterator[dict[str, object]]:
    """The settings of the group for each server: its workers' ranks follow those of the servers before it."""
    first = 1
    for member in members:
        packing = {"packed": True, "packed_buffer_size_bytes": part_bytes}
        yield {"init_info": {**meeting, "rank_offset": first, **packing}}
        first += member.workers


def _described(part: Mapping[str, Tensor]) -> dict[str, object]:
    return {
        "names": list(part),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in part.values()],
        "shapes": [list(tensor.shape) for tensor in part.values()],
    }


def _address(members: Sequence[Member]) -> str:
    """This machine's address for the servers: the source address of packets to the first remote server."""
    for member in members:
        host = urlsplit(member.client.url).hostname or ""
        if host in (LOOPBACK, "localhost", "::1"):
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    return LOOPBACK
