"""Weights over NCCL, as far as it goes without a GPU: who is told what, in which order, and who is left out.

The wire is a list; the servers are stand-ins. What NCCL does with it takes two GPUs.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from stand_in_server import TOKEN, TRANSFER, StandIn, serving
from torch import Tensor

from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import PluginError, SamplerError
from condensegrpo.core.plugins import check
from condensegrpo.samplers.vllm_server.client import ServerClient
from condensegrpo.samplers.vllm_server.nccl import NcclCourier, Wire
from condensegrpo.samplers.vllm_server.replica import Replica, Weights

SHAPE = {"model_type": "qwen3"}
MODEL = {"embed": torch.arange(6.0).reshape(2, 3), "head": torch.tensor([1.5, 2.5], dtype=torch.float64)}
LEAVE, INVITE, START, TAKE, FINISH = TRANSFER


class Recorded:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.left = False

    def broadcast(self, tensor: Tensor, src: int) -> None:
        assert src == 0
        self.sent.append(tensor.clone())

    def destroy(self) -> None:
        self.left = True


class Place:
    """Two servers that stand in, their replicas, and a courier whose wires are recorded."""

    def __init__(self, servers: tuple[StandIn, ...], loop: BackgroundLoop) -> None:
        self.loop = loop
        self.wanted = Weights(label="default", folder=None)
        self.wires: list[Recorded] = []
        self.meetings: list[Mapping[str, Any]] = []
        self.courier = NcclCourier(loop, seconds=5.0, dtype=torch.float32, join=self.join)
        self.replicas: list[Replica] = []
        loop.run(self.open(servers))

    def join(self, meeting: Mapping[str, Any]) -> Wire:
        self.meetings.append(meeting)
        self.wires.append(Recorded())
        return self.wires[-1]

    async def open(self, servers: tuple[StandIn, ...]) -> None:
        for place, server in enumerate(servers):
            client = ServerClient(server.url, TOKEN)
            self.replicas.append(
                Replica(client, None, place=place, shape=SHAPE, wanted=lambda: self.wanted, start_seconds=2.0)
            )
        for replica in self.replicas:
            await replica.revive()

    def carry(self, version: int) -> None:
        self.wanted = self.courier.carry(self.replicas, iter(MODEL.items()), f"run:{version}")

    def lose(self, place: int) -> None:
        """A server was started anew: it lives, with the weights of its start."""

        async def revived() -> None:
            with pytest.raises(SamplerError, match="it gets the next ones"):
                await self.replicas[place].revive()

        self.loop.run(revived())


@contextmanager
def place(*servers: StandIn) -> Iterator[Place]:
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(serving(server))
        loop = BackgroundLoop("test")
        made = Place(servers, loop)
        try:
            yield made
        finally:
            for replica in made.replicas:
                loop.run(replica.close())
            loop.close()


def steps(server: StandIn) -> list[str]:
    return [step for step, _ in server.transfers]


def test_all_workers_meet_once_and_every_update_goes_to_all_of_them() -> None:
    first, second = StandIn(SHAPE, nccl=True), StandIn(SHAPE, nccl=True)
    with place(first, second) as made:
        made.carry(1)
        made.carry(2)
        invitations = [dict(server.transfers)[INVITE]["init_info"] for server in (first, second)]
        assert [one["rank_offset"] for one in invitations] == [1, 2]  # a worker each; the learner is rank 0
        assert {one["world_size"] for one in invitations} == {3}
        (meeting,) = made.meetings
        assert all(meeting.items() <= one.items() for one in invitations)
        assert steps(first) == steps(second) == [LEAVE, INVITE, *[START, TAKE, FINISH] * 2]
        (wire,) = made.wires
        assert [tensor.dtype for tensor in wire.sent] == [torch.float32] * 4
        assert torch.equal(wire.sent[0], MODEL["embed"])
        info = dict(first.transfers)[TAKE]["update_info"]
        assert info == {"names": ["embed", "head"], "dtype_names": ["float32"] * 2, "shapes": [[2, 3], [2]]}
        assert (first.label, second.label) == ("run:2", "run:2")
        assert (first.resets, second.resets) == (2, 2)  # no prefix of the old weights is left
        assert all(replica.ready for replica in made.replicas)


def test_a_server_that_was_lost_gets_the_next_weights_in_a_new_group() -> None:
    first, second = StandIn(SHAPE, nccl=True), StandIn(SHAPE, nccl=True)
    with place(first, second) as made:
        made.carry(1)
        second.label = "default"
        made.lose(1)
        assert [replica.ready for replica in made.replicas] == [True, False]
        made.carry(2)
        assert [wire.left for wire in made.wires] == [True, False]
        assert steps(first)[-5:] == [LEAVE, INVITE, START, TAKE, FINISH]
        assert second.label == "run:2"
        assert all(replica.ready for replica in made.replicas)


def test_the_others_get_weights_where_one_is_gone_and_none_is_an_error() -> None:
    first, second = StandIn(SHAPE, nccl=True), StandIn(SHAPE, nccl=True)
    with place(first, second) as made:
        second.healthy = False
        made.carry(1)
        assert (first.label, second.label) == ("run:1", "default")
        assert {meeting["world_size"] for meeting in made.meetings} == {2}
        first.healthy = False
        with pytest.raises(SamplerError, match="none of 2 servers answers"):
            made.carry(2)


def test_a_server_that_was_started_without_is_said() -> None:
    with place(StandIn(SHAPE)) as made, pytest.raises(SamplerError, match=r"started without.*server\.weights=nccl"):
        made.carry(1)


def test_a_group_that_cannot_be_joined_is_an_error_that_says_where() -> None:
    with place(StandIn(SHAPE, nccl=True)) as made:

        def refuse(meeting: Mapping[str, Any]) -> Wire:
            raise RuntimeError("no route")

        made.courier = NcclCourier(made.loop, seconds=5.0, dtype=torch.float32, join=refuse)
        with pytest.raises(
            SamplerError, match=r"joining 1 servers over NCCL at 127\.0\.0\.1:\d+: RuntimeError: no route"
        ):
            made.carry(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which NCCL works on")
def test_without_a_gpu_nccl_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(PluginError, match="NCCL goes from GPU to GPU, and there is none"):
        check("samplers", "vllm_server", {"model_path": "", "urls": ["http://x"], "server": {"weights": "nccl"}})
