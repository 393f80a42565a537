"""Samples from vLLM servers over HTTP: servers that it starts, or any that ``condensegrpo serve`` started.

    trajectory ─▶ its replica (which caches its prefix) ─▶ reply + the label of its weights ─▶ checked
                        │ gone: another replica, until this one answers and is given the weights
    learner ─▶ folder of weights ─▶ every replica, prefix cache dropped, label set

A reply that was sampled with other weights than the current ones is never returned.
"""

import logging
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Ge

from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols.sampler import NamedTensors, Sampler
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.learner.devices import DTYPES
from condensegrpo.learner.model_folder import trained_steps
from condensegrpo.learner.ranks import from_first, machines, rank
from condensegrpo.learner.settings import DtypeName, LoraSettings
from condensegrpo.samplers.vllm.request import check_request, picture_prompts
from condensegrpo.samplers.vllm.settings import NCCL, TEMPORARY, RequestSettings, ServedModel, ServerSettings
from condensegrpo.samplers.vllm.weights import ExpectedWeights, native_rank
from condensegrpo.samplers.vllm_server.client import ServerClient
from condensegrpo.samplers.vllm_server.pool import STARTED_WITH, ReplicaPool, WeightsLabel
from condensegrpo.samplers.vllm_server.process import ServerProcess, check_vllm_installed, devices_of
from condensegrpo.samplers.vllm_server.publish import FolderPublisher, NcclPublisher
from condensegrpo.samplers.vllm_server.server import TOKEN_VARIABLE, shape_of
from condensegrpo.storage.media import MediaFolder

_LOG = logging.getLogger(__name__)
Publisher = FolderPublisher | NcclPublisher
SERVER, REQUESTS = ServerSettings(), RequestSettings()


class _Servers(Sampler):
    """Samples from the servers of a pool, which runs in a loop of its own."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool, self._loop, self._in_flight = pool, BackgroundLoop("vllm-servers"), 0

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply to one prompt, by the server of its trajectory, or by another where that one is gone."""
        if not self._pool.replicas:
            raise SamplerError("sampling a reply: the sampler was closed")
        check_request(prompt_ids, params, room=self._pool.room)
        self._in_flight += 1
        try:
            return await self._loop.call(self._pool.sample(prompt_ids, params))
        finally:
            self._in_flight -= 1

    def close(self) -> None:
        """End the processes of the pool and all connections. May be called twice; later requests fail."""
        if self._pool.replicas:
            self._loop.run(self._pool.close())
        self._loop.close()


class VllmClient(_Servers):
    """Samples from the servers of a sampler in another process, which gives them the weights."""

    def __init__(
        self,
        model_path: str,
        *,
        pools: Callable[..., ReplicaPool],
        urls: Sequence[str],
        weights: WeightsLabel,
        version: int,
        media: MediaFolder | None,
    ) -> None:
        """Connect; ``pools`` makes the pool, and ``weights`` have the version ``version``."""
        self.version = version
        client = partial(ServerClient, pictures=picture_prompts(model_path, media))
        super().__init__(pools(weights=weights, gives_weights=False, client=client))
        self._loop.run(self._pool.connect(urls))


class VllmServerSampler(_Servers):
    """Samples from one or more vLLM servers; every trajectory stays with one of them, where its prefix is cached."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: DtypeName = "float32",
        max_model_len: Annotated[int, Ge(2)] | None = None,
        lora: LoraSettings | None = None,
        urls: tuple[str, ...] = (),
        urls_file: str | None = None,
        replicas: Annotated[int, Ge(1)] = 1,
        server: ServerSettings = SERVER,
        requests: RequestSettings = REQUESTS,
        media: MediaFolder | None = None,
    ) -> None:
        """Start servers or connect to running ones; every server must serve this model.

        Args:
            model_path: a Hugging Face folder or Hub id.
            max_model_len: most tokens of a prompt and its reply; a run gives the largest of its rollouts. Running
                servers have their own.
            lora: adapters that updates may bring instead of weights; a run gives its own.
            urls: of running servers, such as ``http://10.0.0.5:8000``; their token is in ``VLLM_API_KEY``. Empty: the
                sampler starts servers on free ports of the loopback interface, which end with it.
            urls_file: instead of ``urls``, a file with the URL of a running server a line. It is read again at every
                update of the weights: servers join and leave while the run goes on.
            replicas: number of servers to start.
            server: settings of the servers to start; ``weights`` and ``start_seconds`` apply to running ones too.
            requests: limits of a request.
            media: where the pictures of prompts are; None: prompts show none.
        """
        self.check_options(urls=urls, urls_file=urls_file, replicas=replicas, server=server)
        self._urls_file = urls_file
        urls = from_first(_addresses(urls, urls_file))
        self._run, self._updates = from_first(secrets.token_hex(4)), 0  # no server holds weights of this run already
        self.version = trained_steps(model_path) or 0  # the optimiser step whose weights are in use
        self._shared = bool(urls)
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # None: the system's default
        self._home = Path(tempfile.mkdtemp(prefix="condensegrpo-servers-", dir=memory))
        self._remove = weakref.finalize(self, shutil.rmtree, self._home, ignore_errors=True)
        self._expected = ExpectedWeights(model_path)
        self._publisher: Publisher | None = None
        first = WeightsLabel(label=STARTED_WITH, folder=None)
        if urls and Path(model_path).is_dir():  # of a Hub id it is only known whether a server was updated since
            first = WeightsLabel(label=f"{self._run}:start", folder=str(Path(model_path).resolve()))
        token = os.environ.get(TOKEN_VARIABLE, "") if urls else secrets.token_urlsafe(24)
        shape, seconds = shape_of(self._expected.config), server.start_seconds
        pools = partial(ReplicaPool, requests=requests, token=token, shape=shape, start_seconds=seconds)
        self._client = partial(VllmClient, model_path, pools=pools, media=media)
        client = partial(ServerClient, pictures=picture_prompts(model_path, media))
        super().__init__(pools(weights=first, gives_weights=not self._shared or rank() == 0, client=client))
        model = ServedModel(path=model_path, dtype=dtype, max_model_len=max_model_len, lora=lora)
        devices = () if urls else devices_of(server, replicas)  # of the servers to start
        processes = [
            ServerProcess(model, server, token=token, log=self._home / f"server-{number}.log", device=device)
            for number, device in enumerate(devices)
        ]
        try:
            self._loop.run(self._pool.open([*zip(urls, repeat(None)), *((each.url, each) for each in processes)]))
            self._lora = self._native(lora, dtype, server)  # None: updates bring all weights
            self.takes_adapters = self._lora is not None
            self._publisher = self._open_publisher(server, DTYPES[dtype])
            if self._shared and rank() == 0 and isinstance(self._publisher, FolderPublisher):
                self._loop.submit(self._pool.watch())
        except BaseException:
            self.close()
            raise

    @staticmethod
    def check_options(
        *,
        urls: tuple[str, ...] = (),
        urls_file: str | None = None,
        replicas: int = 1,
        server: ServerSettings = SERVER,
        **_: object,
    ) -> None:
        """Check combinations of options without a model."""
        if urls and urls_file is not None:
            raise ValueError(f"urls={list(urls)} and urls_file={urls_file}: wanted one of them")
        urls = _addresses(urls, urls_file)
        if server.devices and len(server.devices) != replicas:
            raise ValueError(f"server.devices={list(server.devices)}: wanted one for each of {replicas} replicas")
        if server.weights == NCCL and not torch.cuda.is_available():
            raise ValueError("server.weights='nccl': NCCL needs a GPU, and there is none; use weights=folder")
        if not urls:
            check_vllm_installed()

    def client(self) -> "Callable[[], VllmClient]":
        """A call that opens a client of the servers in another process, for the weights in use now."""
        urls = [replica.url for replica in self._pool.replicas]
        return partial(self._client, urls=urls, weights=self._pool.weights, version=self.version)

    def update(self, named_tensors: NamedTensors, version: int) -> None:
        """Give the learner's weights or adapters to every server; each drops its prefix cache.

        Every rank must call it. The first rank of a machine, or of all ranks that share servers, writes a folder that
        the servers load. A server that is gone gets the weights before it serves again. With ``server.weights=nccl``
        they go from GPU to GPU instead, and a server that is gone gets the next ones.
        """
        self._check_idle(version)
        self.stage(named_tensors, version)()

    def stage(self, named_tensors: NamedTensors, version: int) -> Callable[[], None]:
        """Write the weights for an update while the servers sample; the call that it returns makes the update.

        Over NCCL nothing is staged: the call sends the tensors, which must not change before.
        """
        if self._publisher is None:
            raise SamplerError(f"updating the servers' weights to version {version}: the sampler was closed")
        servers = self._servers_of_file()
        checked = self._expected.check(self._lora).passed(named_tensors)
        self._updates += 1  # a version may come twice, with other weights
        publish = self._publisher.stage(self._pool, checked, f"{self._run}:{self._updates}:{version}")

        def update() -> None:
            self._check_idle(version)
            if servers is not None:
                self._loop.run(self._pool.follow(servers))
            publish()
            self.version = version

        return update

    def _servers_of_file(self) -> tuple[str, ...] | None:
        """The URLs that the first rank reads now; None: they stay. Every rank must call it."""
        if self._urls_file is None:
            return None
        found = None
        if rank() == 0:
            try:
                found = _addresses((), self._urls_file)
            except ValueError as error:  # such as a file that is being written
                _LOG.warning("%s; the run keeps its servers", error)
        return from_first(found)

    def _check_idle(self, version: int) -> None:
        if self._in_flight:
            raise SamplerError(
                f"updating the servers' weights to version {version}: {self._in_flight} requests are under way, and a "
                f"reply must come from one policy. Wait for them, or cancel them, first."
            )

    def _native(self, lora: LoraSettings | None, dtype: str, server: ServerSettings) -> LoraSettings | None:
        """The adapters that every server computes itself; None: it gets merged weights."""

        def unsupported() -> str:
            if server.weights == NCCL:
                return "server.weights=nccl sends whole weights"
            needed = 0 if lora is None else lora.rank
            served = ((replica.url, replica.description) for replica in self._pool.replicas)
            small = [url for url, description in served if description is None or description.lora_rank < needed]
            return f"{', '.join(small)} was started without --enable-lora for this rank" if small else ""

        return lora if native_rank(lora, dtype=dtype, unsupported=unsupported) is not None else None

    def _open_publisher(self, server: ServerSettings, kind: torch.dtype) -> Publisher:
        """Every rank must call it."""
        if server.weights == NCCL:
            return NcclPublisher(self._loop, seconds=server.start_seconds, dtype=kind)
        all_ranks = machines()
        writer = 0 if self._shared else all_ranks.index(all_ranks[rank()])
        weights = self._home if server.weights == TEMPORARY else Path(server.weights)
        publisher = FolderPublisher(
            loop=self._loop,
            folder=weights / f"condensegrpo-{self._run}-{writer}",  # machines may share the folder around it
            dtype=kind,
            nbytes=self._expected.check(self._lora).nbytes(kind),
            writer=writer,
            lora=self._lora,
        )
        publisher.check_room()
        return publisher

    def close(self) -> None:
        """End the sampler's own servers and all connections. May be called twice; later requests fail."""
        publisher, self._publisher = self._publisher, None
        if isinstance(publisher, NcclPublisher):
            publisher.close()
        super().close()
        if isinstance(publisher, FolderPublisher):
            publisher.close()
        self._remove()


def _addresses(urls: Sequence[str], file: str | None) -> tuple[str, ...]:
    """The URLs of a list or a file, each once: a server that is named twice would get two requests at a time."""
    found = list(urls)
    if file is not None:
        try:
            found = Path(file).read_text(encoding="utf-8").split()
        except OSError as error:
            raise ValueError(f"urls_file={file}: {error.strerror}") from error
    if not all(url.startswith(("http://", "https://")) for url in found) or (file is not None and not found):
        option = "urls" if file is None else f"urls_file={file}"
        raise ValueError(f"{option}: found {found}, wanted addresses such as http://10.0.0.5:8000")
    return tuple(dict.fromkeys(url.rstrip("/") for url in found))
