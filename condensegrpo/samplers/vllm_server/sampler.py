"""The sampler that asks vLLM servers over HTTP: servers of its own, or any that ``condensegrpo serve`` started.

    trajectory ─▶ its replica (the one that holds the prefix) ─▶ reply + the label of its weights ─▶ checked
                        │ gone: another one, while this one is brought up and given the weights
    learner ─▶ folder of weights ─▶ every replica, prefix cache dropped, label set

A reply that was not sampled with the weights wanted is never handed on.
"""

import asyncio
import hashlib
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import distributed
from transformers import AutoConfig

from condensegrpo.config.section import parse
from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import SamplerError, ServerUnreachable
from condensegrpo.core.protocols import NamedTensors
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.samplers.vllm.request import check_request
from condensegrpo.samplers.vllm.weights import Expected
from condensegrpo.samplers.vllm_server.client import ServerClient
from condensegrpo.samplers.vllm_server.guard import TOKEN_VARIABLE
from condensegrpo.samplers.vllm_server.nccl import NcclCourier
from condensegrpo.samplers.vllm_server.process import Child, ServedModel, ServerSettings, check_installed
from condensegrpo.samplers.vllm_server.replica import STARTED_WITH, Replica, Weights
from condensegrpo.samplers.vllm_server.weights import checked, write_weights
from condensegrpo.samplers.vllm_server.worker import shape_of

T = TypeVar("T")
SETTINGS = "sampler.options.server"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PAUSE_SECONDS = 0.2  # before a request is tried again; doubled every time


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
        self._settings = parse(ServerSettings, server or {}, source=SETTINGS)
        self._model = ServedModel(path=model_path, dtype=dtype, max_model_len=max_model_len)
        self._seconds = request_seconds
        self._retries = retries
        self._urls = tuple(urls)
        self._run = _agreed(secrets.token_hex(4))  # of this run: no server has its weights from another one
        self._version = 0
        self._under_way = 0
        self._home = Path(tempfile.mkdtemp(prefix="condensegrpo-servers-", dir=_memory()))
        self._remove = weakref.finalize(self, shutil.rmtree, self._home, ignore_errors=True)
        self._weights_dir = Path(weights_dir) if weights_dir is not None else self._home
        self._weights = _first_weights(model_path, self._run) if urls else Weights(label=STARTED_WITH, folder=None)
        self._children = [] if urls else self._made(replicas)
        self._replicas: list[Replica] = []
        self._expected = Expected(model_path)
        self._loop = BackgroundLoop("vllm-servers")
        self._courier = self._hired()
        try:
            self._loop.run(self._open(shape_of(AutoConfig.from_pretrained(model_path))))
            self._loop.run(self._bring_up())
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
        self._check(prompt_ids, params)
        self._under_way += 1
        try:
            return await self._loop.call(self._answer(tuple(prompt_ids), params))
        finally:
            self._under_way -= 1

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Write the learner's weights to a folder, have every server load them and drop its prefix cache.

        Several ranks that share servers must all call it: the first writes, the others wait. A server that is gone gets
        the weights before it serves again. With ``server.weights=nccl`` they go from GPU to GPU instead, and a server
        that is gone gets the next ones.

        Raises:
            SamplerError: requests are under way, the weights are not those of the model, or no server took them.
        """
        if self._under_way:
            raise SamplerError(
                f"updating the servers' weights to version {version}: {self._under_way} requests are under way, and a "
                f"reply must come from one policy. Wait for them, or cancel them, first."
            )
        together = bool(self._urls) and _ranks() > 1
        publish = self._publish_for_all if together else self._publish
        self._weights = publish(named_tensors, version)
        self._version = version

    @property
    def version(self) -> int:
        """The optimiser step whose weights are in use; 0 before the first update."""
        return self._version

    @property
    def process_ids(self) -> tuple[int | None, ...]:
        """Of the servers that are our own."""
        return tuple(child.process_id for child in self._children)

    @property
    def starts(self) -> tuple[int, ...]:
        """How often each server was started by us."""
        return tuple(replica.starts for replica in self._replicas)

    def close(self) -> None:
        """End our own servers and give all connections back. May be called twice; requests that come later fail."""
        replicas, self._replicas = self._replicas, []
        if self._courier is not None:
            self._courier.leave()
        if replicas:
            self._loop.run(_close_all(replicas))
        self._loop.close()
        self._remove()

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        if not self._replicas:
            raise SamplerError("sampling a reply: the sampler was closed")
        check_request(prompt_ids, params, room=self._room)

    @property
    def _room(self) -> int | None:
        """Tokens of prompt and output that every server takes; None: none has said."""
        return min((one.description.max_model_len for one in self._replicas if one.description), default=None)

    def _made(self, replicas: int) -> list[Child]:
        devices: list[str | None] = [*self._settings.devices] or [None] * replicas
        return [
            Child(
                self._model,
                self._settings,
                token=self._token,
                log=self._home / f"server-{number}.log",
                device=device,
            )
            for number, device in enumerate(devices)
        ]

    @cached_property
    def _token(self) -> str:
        """Of other people's servers; of our own, one that nobody else knows."""
        return os.environ.get(TOKEN_VARIABLE, "") if self._urls else secrets.token_urlsafe(24)

    async def _open(self, shape: Mapping[str, str]) -> None:
        """Make the replicas, in the loop that they live in."""
        places: list[tuple[str, Child | None]] = [(url, None) for url in self._urls]
        places += [(child.url, child) for child in self._children]
        self._replicas = [
            Replica(
                ServerClient(url, self._token),
                child,
                place=place,
                shape=shape,
                wanted=lambda: self._weights,
                start_seconds=self._settings.start_seconds,
            )
            for place, (url, child) in enumerate(places)
        ]

    async def _bring_up(self) -> None:
        """Have every replica ready, or raise what the first that failed says."""
        await asyncio.gather(*(asyncio.shield(replica.revive()) for replica in self._replicas))

    async def _answer(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> Generation:
        last: SamplerError | None = None
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
            try:
                replica = await self._pick(params.trajectory, attempt)
                reply = await replica.generate(prompt_ids, params, self._seconds)
            except ServerUnreachable as error:
                last = error
                continue
            if set(reply.labels) == {self._weights.label}:
                return reply.generation
            replica.fail()
            last = SamplerError(f"{replica.url} sampled with the weights {reply.labels}, not {self._weights.label}")
        raise SamplerError(f"sampling a reply: {self._retries + 1} attempts failed; the last: {last}") from last

    async def _pick(self, trajectory: str, attempt: int) -> Replica:
        """The replica of a trajectory, or the next that is ready. If none is, wait for one to be brought up."""
        ranked = sorted(self._replicas, key=lambda one: _rank_of(trajectory, one.place))
        for replica in ranked:
            if replica.ready:
                return replica
        replica = ranked[attempt % len(ranked)]
        await asyncio.shield(replica.revive())
        return replica

    def _hired(self) -> NcclCourier | None:
        """Who carries weights over NCCL, if anybody does."""
        if self._settings.weights != "nccl":
            return None
        return NcclCourier(self._loop, seconds=self._settings.start_seconds, dtype=DTYPES[self._model.dtype])

    def _publish(self, named_tensors: NamedTensors, version: int) -> Weights:
        """Write weights and have the servers load them, or send them; what the servers hold then."""
        old, label = self._weights, f"{self._run}:{version}"
        if self._courier is not None:
            return self._courier.carry(self._replicas, checked(named_tensors, self._expected), label)
        folder = self._weights_dir / f"{self._run}-{version}-{secrets.token_hex(2)}"
        write_weights(folder, checked(named_tensors, self._expected), DTYPES[self._model.dtype])
        self._weights = Weights(label=label, folder=str(folder.resolve()))
        try:
            self._loop.run(self._load())
        except BaseException:
            self._weights = old
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if old.folder is not None and Path(old.folder).parent == self._weights_dir.resolve():
            shutil.rmtree(old.folder, ignore_errors=True)
        return self._weights

    def _publish_for_all(self, named_tensors: NamedTensors, version: int) -> Weights:
        """The same where several ranks share the servers: the first rank publishes, and says what became of it."""
        told: Weights | SamplerError | None = None
        if distributed.get_rank() == 0:
            try:
                told = self._publish(named_tensors, version)
            except SamplerError as error:
                told = error
        for _ in named_tensors:  # gathering sharded weights takes every rank, to the end
            pass
        told = _agreed(told)
        if isinstance(told, SamplerError):
            raise told
        if told is None:
            raise SamplerError("updating the servers' weights: the first rank said nothing of them")
        return told

    async def _load(self) -> None:
        """Have the servers take the weights: those that are ready now, the others when they are brought up again.

        Raises:
            SamplerError: one refused, or none is left.
        """
        ready = [replica for replica in self._replicas if replica.ready]
        results = await asyncio.gather(*(replica.load(self._weights) for replica in ready), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ServerUnreachable):
                raise result
        revived = [asyncio.shield(replica.revive()) for replica in self._replicas if not replica.ready]
        if not any(replica.ready for replica in self._replicas):
            results = await asyncio.gather(*revived, return_exceptions=True)
            failures = [result for result in results if isinstance(result, BaseException)]
            if len(failures) == len(results):
                raise failures[0]


def _first_weights(model_path: str, run: str) -> Weights:
    """What servers that are not ours must hold before the first update: this model's weights, not an older run's.

    A folder is loaded anew. Of a Hub id nothing better is known than that the server has not been updated since.
    """
    if Path(model_path).is_dir():
        return Weights(label=f"{run}:start", folder=str(Path(model_path).resolve()))
    return Weights(label=STARTED_WITH, folder=None)


async def _close_all(replicas: Sequence[Replica]) -> None:
    await asyncio.gather(*(replica.close() for replica in replicas))


def _rank_of(trajectory: str, place: int) -> bytes:
    """Where a replica stands in a trajectory's list: fixed, and if one goes, its trajectories spread over the others.

    Rendezvous hashing (https://doi.org/10.1109/90.663936).
    """
    return hashlib.blake2b(f"{place}/{trajectory}".encode(), digest_size=8).digest()


def _ranks() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _agreed(value: T) -> T:
    """The first rank's value, on every rank."""
    if _ranks() == 1:
        return value
    held = [value]
    distributed.broadcast_object_list(held, src=0)
    return held[0]


def _memory() -> str | None:
    """Where temporary files lie in memory; None: the system's ordinary place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
