"""A server that takes the learner's weights by CUDA IPC, vLLM's native transfer between processes on one GPU.

A sampler for ``train``: ``sampler.name=PATH/ipc_servers.py:IpcServers``, as ``colocated.py`` sets it. The server is
started with ``FLAGS`` and ``ENVIRONMENT``. It needs a GPU: nothing but its configuration was tried without one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from condensegrpo.samplers.vllm.settings import ServerSettings
from condensegrpo.samplers.vllm_server.pool import ReplicaPool
from condensegrpo.samplers.vllm_server.publish import NcclPublisher
from condensegrpo.samplers.vllm_server.sampler import Publisher, VllmServerSampler

FLAGS = ("--weight-transfer-config", '{"backend": "ipc"}')
ENVIRONMENT = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # handles of CUDA IPC are pickled


class IpcServers(VllmServerSampler):
    """``vllm_server`` with one server, on the learner's GPU."""

    def _open_publisher(self, server: ServerSettings, kind: torch.dtype) -> Publisher:
        return IpcPublisher(self._loop, seconds=server.start_seconds, dtype=kind)


@dataclass(eq=False)
class IpcPublisher(NcclPublisher):
    """Sends handles of the weights in place of their bytes."""

    _transfer: Any = field(default=None, init=False)  # vLLM's, opened by the first update

    def _publish(self, pool: ReplicaPool, named_tensors: Iterator[tuple[str, Tensor]], label: str) -> None:
        (replica,) = pool.replicas
        self._transfer = self._transfer or self._opened(replica.client)
        self._transfer.source = [(name, tensor.to("cuda", self.dtype)) for name, tensor in named_tensors]
        try:
            self._transfer.send_weights()
        finally:
            self._transfer.source = None
        self.loop.run(replica.receive(label))

    def _opened(self, client: Any) -> Any:  # noqa: ANN401  vLLM's classes are untyped
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

        loop, seconds = self.loop, self.seconds

        class Client(HTTPVLLMWeightSyncClient):  # type: ignore[misc]  # untyped
            """With the token and the time limits of the sampler's client."""

            def _post(self, path: str, json: Any = None) -> None:  # noqa: ANN401  as vLLM's
                loop.run(client.call("POST", f"/{path}", json, seconds))

        return IPCTrainerWeightTransferEngine.trainer_init(
            IPCTrainerInitInfo(packed=True), client=Client(""), source=()
        )
