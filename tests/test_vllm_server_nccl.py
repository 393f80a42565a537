"""Weights over NCCL without a GPU: the calls that each server gets, their order, and the servers that are left out.

The wire is a list; the servers are stand-ins. The broadcast itself needs two GPUs.
"""

import asyncio
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from aiohttp import web
from needs_vllm import needs_vllm
from stand_in_server import TOKEN, TRANSFER, StandIn, serving
from torch import Tensor
from torch.distributed import TCPStore

from condensegrpo.config.options import check_plugin
from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import PluginError, SamplerError
from condensegrpo.samplers.vllm.settings import RequestSettings
from condensegrpo.samplers.vllm_server.pool import ReplicaPool, WeightsLabel
from condensegrpo.samplers.vllm_server.publish import NcclPublisher, WeightBroadcast, address_for

SHAPE = {"model_type": "qwen3"}
MODEL = {"embed": torch.arange(6.0).reshape(2, 3), "head": torch.tensor([1.5, 2.5], dtype=torch.float64)}
PART_BYTES = 1 << 10  # of a test
LEAVE, INVITE, START, TAKE, FINISH = TRANSFER


class Recorded(WeightBroadcast):
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.left = False

    def broadcast(self, tensor: Tensor, src: int) -> None:
        assert src == 0
        self.tensors.append(tensor.clone())

    def sent(self) -> bool:
        return True

    def destroy(self) -> None:
        self.left = True


class Group:
    """A pool over stand-in servers, and a publisher whose wires are recorded."""

    def __init__(self, servers: tuple[StandIn, ...], loop: BackgroundLoop) -> None:
        self.loop = loop
        self.wires: list[Recorded] = []
        self.meetings: list[Mapping[str, Any]] = []
        self.publisher = NcclPublisher(loop, seconds=60.0, dtype=torch.float32, join=self.join, part_bytes=PART_BYTES)
        self.pool = ReplicaPool(
            weights=WeightsLabel(label="default", folder=None),
            requests=RequestSettings(seconds=60.0, retries=0),
            token=TOKEN,
            shape=SHAPE,
            start_seconds=60.0,
        )
        loop.run(self.pool.open([(server.url, None) for server in servers]))

    def join(self, meeting: Mapping[str, Any]) -> WeightBroadcast:
        self.meetings.append(meeting)
        self.wires.append(Recorded())
        return self.wires[-1]

    @property
    def ready(self) -> list[bool]:
        return [replica.ready for replica in self.pool.replicas]

    def publish(self, version: int, model: Mapping[str, Tensor] = MODEL) -> None:
        self.send(iter(model.items()), version)

    def send(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.publisher.stage(self.pool, named_tensors, f"run:{version}")()

    def restart(self, place: int) -> None:
        """A server was restarted: it runs with the weights of its start."""

        async def joined() -> None:
            with pytest.raises(SamplerError, match="it gets the next ones"):
                await self.pool.replicas[place].join()

        self.loop.run(joined())


@contextmanager
def group(*servers: StandIn) -> Iterator[Group]:
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(serving(server))
        loop = stack.enter_context(BackgroundLoop("test"))
        made = Group(servers, loop)
        try:
            yield made
        finally:
            loop.run(made.pool.close())


def steps(server: StandIn) -> list[str]:
    return [step for step, _ in server.transfers]


def received(wire: Recorded, server: StandIn) -> list[tuple[str, list[float]]]:
    """What a worker makes of the broadcasts and of their descriptions."""
    described = [body["update_info"] for step, body in server.transfers if step == TAKE]
    tensors = []
    for sent, info in zip(wire.tensors, described, strict=True):
        types = [getattr(torch, name) for name in info["dtype_names"]]
        sizes = [math.prod(shape) * of.itemsize for shape, of in zip(info["shapes"], types, strict=True)]
        for name, of, piece in zip(info["names"], types, sent.split(sizes), strict=True):
            tensors.append((name, piece.view(of).tolist()))
    return tensors


def test_workers_join_once_and_every_update_goes_to_all_of_them() -> None:
    first, second = StandIn(SHAPE, nccl=True), StandIn(SHAPE, nccl=True)
    with group(first, second) as made:
        made.publish(1)
        made.publish(2)
        invitations = [dict(server.transfers)[INVITE]["init_info"] for server in (first, second)]
        assert [one["rank_offset"] for one in invitations] == [1, 2]  # a worker each; the learner is rank 0
        assert {one["world_size"] for one in invitations} == {3}
        (meeting,) = made.meetings
        assert all(meeting.items() <= one.items() for one in invitations)
        assert steps(first) == steps(second) == [LEAVE, INVITE, *[START, TAKE, FINISH] * 2]
        (wire,) = made.wires
        assert len(wire.tensors) == 2  # one broadcast an update
        assert received(wire, first) == [("embed", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), ("head", [1.5, 2.5])] * 2
        info = dict(first.transfers)[TAKE]["update_info"]
        assert info == {"names": ["embed", "head"], "dtype_names": ["float32"] * 2, "shapes": [[2, 3], [2]]}
        assert (first.label, second.label) == ("run:2", "run:2")
        assert (first.resets, second.resets) == (2, 2)  # no prefix of the old weights is left
        assert made.ready == [True, True]


def test_small_tensors_share_a_broadcast_and_a_large_one_has_its_own() -> None:
    """As vLLM's receiver expects it: one type in a broadcast, and at most its buffer unless it is one tensor."""
    generator = torch.Generator().manual_seed(0)
    model = {f"norm.{number}": torch.randn(7, generator=generator) for number in range(100)}
    model |= {"large": torch.randn(1000, generator=generator), "steps": torch.arange(3), "last": torch.ones(1)}
    server = StandIn(SHAPE, nccl=True)
    with group(server) as made:
        made.publish(1, model)
        (wire,) = made.wires
        assert dict(server.transfers)[INVITE]["init_info"]["packed_buffer_size_bytes"] == PART_BYTES
        assert received(wire, server) == [(name, tensor.tolist()) for name, tensor in model.items()]
        assert [tensor.nbytes for tensor in wire.tensors] == [36 * 28, 36 * 28, 28 * 28, 4000, 3 * 8, 4]


@needs_vllm
def test_vllm_packs_the_same_bytes() -> None:
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    server = StandIn(SHAPE, nccl=True)
    model = {name: tensor.float() for name, tensor in MODEL.items()}
    with group(server) as made:
        made.publish(1, model)
        packed = pack_tensors(iter(model.items()), lambda item: item[1], PART_BYTES)
        assert torch.equal(made.wires[0].tensors[0], packed.packed_tensor)


def test_a_restarted_server_gets_the_next_weights_in_a_new_group() -> None:
    first, second = StandIn(SHAPE, nccl=True), StandIn(SHAPE, nccl=True)
    with group(first, second) as made:
        made.publish(1)
        second.label = "default"
        made.restart(1)
        assert made.ready == [True, False]
        made.publish(2)
        assert [wire.left for wire in made.wires] == [True, False]
        assert steps(first)[-5:] == [LEAVE, INVITE, START, TAKE, FINISH]
        assert second.label == "run:2"
        assert made.ready == [True, True]


def test_a_restart_that_no_request_noticed_leaves_a_server_out_of_the_old_group() -> None:
    """Its new processes were never in it: the broadcast would have waited for them."""
    first, second = StandIn(SHAPE, nccl=True), StandIn(SHAPE, nccl=True)
    with group(first, second) as made:
        made.publish(1)
        second.label = "default"
        made.publish(2)
        assert [meeting["world_size"] for meeting in made.meetings] == [3, 2]
        assert (first.label, second.label) == ("run:2", "default")
        assert made.ready == [True, False]


def test_without_one_server_the_others_get_weights_and_without_any_it_is_an_error() -> None:
    first, second = StandIn(SHAPE, nccl=True), StandIn(SHAPE, nccl=True)
    with group(first, second) as made:
        second.healthy = False
        made.publish(1)
        assert (first.label, second.label) == ("run:1", "default")
        assert {meeting["world_size"] for meeting in made.meetings} == {2}
        first.healthy = False
        with pytest.raises(SamplerError, match="none of 2 servers answers"):
            made.publish(2)


def test_a_server_started_without_nccl_is_an_error() -> None:
    with group(StandIn(SHAPE)) as made, pytest.raises(SamplerError, match=r"started without.*server\.weights=nccl"):
        made.publish(1)


def test_a_server_of_several_engines_is_an_error() -> None:
    with group(StandIn(SHAPE, nccl=True, engines=2)) as made, pytest.raises(SamplerError, match="2 data-parallel"):
        made.publish(1)


def test_a_server_whose_name_has_no_address_is_an_error_that_all_ranks_can_raise() -> None:
    with pytest.raises(SamplerError, match=r"joining http://no-such-host.invalid:8000 over NCCL: .*server.weights=fo"):
        address_for(["http://no-such-host.invalid:8000"])


def test_a_failed_join_is_an_error_with_the_address() -> None:
    with group(StandIn(SHAPE, nccl=True)) as made:

        def refuse(meeting: Mapping[str, Any]) -> WeightBroadcast:
            raise RuntimeError("no route")

        made.publisher = NcclPublisher(made.loop, seconds=60.0, dtype=torch.float32, join=refuse)
        with pytest.raises(
            SamplerError, match=r"joining 1 servers over NCCL at 127\.0\.0\.1:\d+: RuntimeError: no route"
        ):
            made.publish(1)


def test_a_worker_that_never_joins_is_an_error_within_the_time_limit() -> None:
    """The rendezvous of vLLM's group is this store; ``ncclCommInitRank``, which follows, waits for ever."""
    meetings: list[Mapping[str, Any]] = []

    def store(*, is_master: bool) -> None:
        address, port = meetings[0]["master_address"], meetings[0]["master_port"]
        TCPStore(address, port, 2, is_master, timedelta(seconds=60))

    def wait_for_all(meeting: Mapping[str, Any]) -> WeightBroadcast:
        meetings.append(meeting)
        store(is_master=True)
        return Recorded()

    with group(StandIn(SHAPE, nccl=True)) as made:
        made.publisher = NcclPublisher(made.loop, seconds=0.3, dtype=torch.float32, join=wait_for_all)
        found = (
            r"joining 1 servers over NCCL at .*: found (servers that are ready and a rank that is not|"
            r"no answer from a server) after 0\.3 seconds"  # the latter on a busy machine
        )
        with pytest.raises(SamplerError, match=found) as caught:
            made.publish(1)
        assert f"wanted a group with {made.pool.replicas[0].url}" in str(caught.value)
        assert "NCCL_SOCKET_IFNAME" in str(caught.value)
        store(is_master=False)  # ends the thread that still waits


def test_the_next_part_is_gathered_while_the_servers_take_one() -> None:
    """Under ZeRO 3 other ranks take part in gathering: they waited for the servers, and the servers for them."""
    gathered = threading.Event()

    class Waiting(StandIn):
        async def transfer(self, request: web.Request) -> web.Response:
            if request.path == TAKE and not await asyncio.to_thread(gathered.wait, 30.0):
                return web.json_response({"error": {"message": "nothing was gathered meanwhile"}}, status=400)
            return await super().transfer(request)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for number in range(3):
            if number == 2:  # the second part is complete, the first is on its way
                gathered.set()
            yield str(number), torch.full((PART_BYTES // 4,), float(number))

    server = Waiting(SHAPE, nccl=True)
    with group(server) as made:
        made.send(tensors(), 1)
        assert received(made.wires[0], server) == [(str(n), [float(n)] * (PART_BYTES // 4)) for n in range(3)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which NCCL works on")
def test_without_a_gpu_nccl_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(PluginError, match="NCCL needs a GPU, and there is none"):
        check_plugin("samplers", "vllm_server", {"model_path": "", "urls": ["http://x"], "server": {"weights": "nccl"}})
