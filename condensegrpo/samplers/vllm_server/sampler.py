"""The sampler that asks vLLM servers over HTTP: servers of its own, or any that ``condensegrpo serve`` started.

    trajectory ─▶ its replica (which caches its prefix) ─▶ reply + the label of its weights ─▶ checked
                        │ gone: another replica, while this one is brought up and given the weights
    learner ─▶ folder of weights ─▶ every replica, prefix cache dropped, label set

A reply that was sampled with other weights than the current ones is never returned.
"""

import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from condensegrpo.config.section import parse
from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols import NamedTensors
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.samplers.vllm.request import check_request
from condensegrpo.samplers.vllm.weights import Expected
from condensegrpo.samplers.vllm_server.guard import TOKEN_VARIABLE
from condensegrpo.samplers.vllm_server.nccl import NcclPublisher
from condensegrpo.samplers.vllm_server.pool import ReplicaPool, Retries
from condensegrpo.samplers.vllm_server.process import ServedModel, ServerProcess, ServerSettings, check_installed
from condensegrpo.samplers.vllm_server.publish import (
    FolderPublisher,
    Publisher,
    from_first_rank,
    publish_on_first_rank,
    ranks,
)
from condensegrpo.samplers.vllm_server.replica import STARTED_WITH, WeightsLabel
from condensegrpo.samplers.vllm_server.weights import checked
from condensegrpo.samplers.vllm_server.worker import shape_of

SETTINGS = "sampler.options.server"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class VllmServerSampler:
    """Samples from one or more vLLM servers; every trajectory stays with one of them, where its prefix is cached."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        max_model_len: int | None = None,
        urls: Sequence[str] = (),
        replicas: int = 1,
        server: Mapping[str, Any] | None = None,
        weights_dir: str | None = None,
        request_seconds: float = 600.0,
        retries: int = 3,
    ) -> None:
        """Start the servers, or find them; every one must serve this model.

        Args:
            model_path: a Hugging Face folder or Hub id.
            max_model_len: most tokens of a prompt and its reply; a run gives the largest that its rollouts can make.
                Servers that run already have their own.
            urls: of servers that run already, such as ``http://10.0.0.5:8000``; their token is in ``VLLM_API_KEY``.
                Empty: servers of our own are started on free ports of the loopback interface, and end with us.
            replicas: how many of our own.
            server: how our own run, see ``ServerSettings``.
            weights_dir: where updates are written for the servers, which must see it; by default a temporary folder,
                in memory where the machine has such.
            request_seconds: time limit of one reply.
            retries: of a request whose server is gone or failed.
        """
        self.check_options(
            dtype=dtype, urls=urls, replicas=replicas, server=server, request_seconds=request_seconds, retries=retries
        )
        settings = parse(ServerSettings, server or {}, source=SETTINGS)
        self._run = from_first_rank(secrets.token_hex(4))  # of this run: no server holds these weights already
        self._version = 0
        self._in_flight = 0
        self._shared = bool(urls)
        self._home = Path(tempfile.mkdtemp(prefix="condensegrpo-servers-", dir=_memory()))
        self._remove = weakref.finalize(self, shutil.rmtree, self._home, ignore_errors=True)
        self._expected = Expected(model_path)
        self._loop = BackgroundLoop("vllm-servers")
        self._publisher: Publisher = (
            NcclPublisher(self._loop, seconds=settings.start_seconds, dtype=DTYPES[dtype])
            if settings.weights == "nccl"
            else FolderPublisher(self._loop, Path(weights_dir) if weights_dir else self._home, DTYPES[dtype])
        )
        token = os.environ.get(TOKEN_VARIABLE, "") if urls else secrets.token_urlsafe(24)
        model = ServedModel(path=model_path, dtype=dtype, max_model_len=max_model_len)
        self._processes = () if urls else _processes(model, settings, replicas, token=token, folder=self._home)
        self._pool = ReplicaPool(
            _first_weights(model_path, self._run) if urls else WeightsLabel(label=STARTED_WITH, folder=None),
            Retries(count=retries, seconds=request_seconds),
        )
        try:
            self._loop.run(
                self._pool.open(
                    [*((url, None) for url in urls), *((process.url, process) for process in self._processes)],
                    token=token,
                    shape=shape_of(AutoConfig.from_pretrained(model_path)),
                    start_seconds=settings.start_seconds,
                )
            )
        except BaseException:
            self.close()
            raise

    @staticmethod
    def check_options(
        *,
        dtype: str = "float32",
        urls: Sequence[str] = (),
        replicas: int = 1,
        server: Mapping[str, Any] | None = None,
        request_seconds: float = 600.0,
        retries: int = 3,
        **_: object,
    ) -> None:
        """Check what can be checked without a model.

        Raises:
            ValueError: the first option that cannot be, with the reason.
            ConfigError: a fault in ``server``.
            SamplerError: vLLM is missing, and servers are to be started here.
        """
        settings = parse(ServerSettings, server or {}, source=SETTINGS)
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r}: wanted one of {', '.join(DTYPES)}")
        if replicas < 1 or retries < 0 or not request_seconds > 0:
            raise ValueError(
                f"replicas={replicas}, retries={retries}, request_seconds={request_seconds}: wanted at least 1 and 0, "
                f"and a time above 0"
            )
        if isinstance(urls, str) or not all(url.startswith(("http://", "https://")) for url in urls):
            raise ValueError(f"urls={urls!r}: wanted a list such as [http://10.0.0.5:8000]")
        if settings.devices and len(settings.devices) != replicas:
            raise ValueError(f"server.devices={list(settings.devices)}: wanted one for each of {replicas} replicas")
        if settings.weights == "nccl" and not torch.cuda.is_available():
            raise ValueError("server.weights='nccl': NCCL goes from GPU to GPU, and there is none; leave it out")
        if not urls:
            check_installed()

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply to one prompt, by the server of its trajectory, or by another where that one is gone.

        Raises:
            SamplerError: the request cannot be met, was refused, or no server answered after all retries.
        """
        if not self._pool.replicas:
            raise SamplerError("sampling a reply: the sampler was closed")
        check_request(prompt_ids, params, room=self._pool.room)
        self._in_flight += 1
        try:
            return await self._loop.call(self._pool.sample(tuple(prompt_ids), params))
        finally:
            self._in_flight -= 1

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Write the learner's weights to a folder, have every server load them and drop its prefix cache.

        Several ranks that share servers must all call it: the first writes, the others wait. A server that is gone gets
        the weights before it serves again. With ``server.weights=nccl`` they go from GPU to GPU instead, and a server
        that is gone gets the next ones.

        Raises:
            SamplerError: requests are in flight, the weights are not those of the model, or no server took them.
        """
        if self._in_flight:
            raise SamplerError(
                f"updating the servers' weights to version {version}: {self._in_flight} requests are under way, and a "
                f"reply must come from one policy. Wait for them, or cancel them, first."
            )
        label = f"{self._run}:{version}"

        def publish() -> WeightsLabel:
            return self._publisher.publish(self._pool, checked(named_tensors, self._expected), label)

        shared = self._shared and ranks() > 1
        self._pool.weights = publish_on_first_rank(publish, named_tensors) if shared else publish()
        self._version = version

    @property
    def version(self) -> int:
        """The optimiser step whose weights are in use; 0 before the first update."""
        return self._version

    @property
    def process_ids(self) -> tuple[int | None, ...]:
        """Of the servers that the sampler started."""
        return tuple(process.process_id for process in self._processes)

    @property
    def starts(self) -> tuple[int, ...]:
        """How often the sampler started each server."""
        return tuple(replica.starts for replica in self._pool.replicas)

    def close(self) -> None:
        """End the sampler's own servers and all connections. May be called twice; later requests fail."""
        self._publisher.close()
        if self._pool.replicas:
            self._loop.run(self._pool.close())
        self._loop.close()
        self._remove()


def _processes(
    model: ServedModel, settings: ServerSettings, count: int, *, token: str, folder: Path
) -> tuple[ServerProcess, ...]:
    """The servers to start, with their logs in a folder."""
    devices: list[str | None] = [*settings.devices] or [None] * count
    return tuple(
        ServerProcess(model, settings, token=token, log=folder / f"server-{number}.log", device=device)
        for number, device in enumerate(devices)
    )


def _first_weights(model_path: str, run: str) -> WeightsLabel:
    """What running servers must hold before the first update: this model's weights, not those of an earlier run.

    The servers load a folder. For a Hub id it is only known that a server was not updated since its start.
    """
    if Path(model_path).is_dir():
        return WeightsLabel(label=f"{run}:start", folder=str(Path(model_path).resolve()))
    return WeightsLabel(label=STARTED_WITH, folder=None)


def _memory() -> str | None:
    """A folder in memory for temporary files; None: the system's default."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
