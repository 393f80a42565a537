"""One server of a sampler, started by it or not: check it, update its weights, drop it, take it back."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from condensegrpo.core.errors import SamplerError, ServerUnreachable
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.learner.settings import LoraSettings
from condensegrpo.samplers.vllm_server.client import Description, Reply, ServerClient
from condensegrpo.samplers.vllm_server.process import ServerProcess

_LOG = logging.getLogger(__name__)
POLL_SECONDS = 0.25  # between two health checks of a server that starts
STARTED_WITH = "default"  # vLLM's label for the weights that a server was started with


class WeightsLabel(NamedTuple):
    """The weights that every reply must come from."""

    label: str  # run:version
    folder: str | None  # that servers load them from; None: they started with them, or received them over NCCL
    adapters: str | None = None  # the PEFT folder of what comes beside the weights

    def needs_base(self, held: str) -> bool:
        """Whether more than the adapters must be loaded into a server whose weights have the label ``held``."""
        if self.adapters is None:
            return True
        if self.folder is None and held == STARTED_WITH:
            return False
        return held.partition(":")[0] != self.label.partition(":")[0]


class ReplicaState(Enum):
    """The states of a server.

    DOWN ──answers, has the weights──▶ READY ──fails──▶ DOWN
    DOWN ──answers, no folder to load from──▶ AWAITS_WEIGHTS ──weights received──▶ READY
                                              AWAITS_WEIGHTS ──fails──▶ DOWN
    """

    DOWN = auto()  # it has not joined yet, or it failed; a task may wait for its answer
    AWAITS_WEIGHTS = auto()  # it runs with old weights, and only the learner has the current ones
    READY = auto()  # it runs with the current weights


@dataclass(kw_only=True, eq=False)
class Replica:
    """A server that is ready, or joins in one task that all its callers await.

    Use it in one event loop. No process is started again here. A server that was started again elsewhere holds other
    weights than the current ones: it gets those before it is ready, and every reply has the label of the weights it was
    sampled with.
    """

    client: ServerClient
    process: ServerProcess | None  # that the sampler started; None: it runs elsewhere
    index: int  # among the sampler's replicas; determines which trajectories it serves
    shape: Mapping[str, str]  # of the model that it must serve
    current_weights: Callable[[], WeightsLabel]
    start_seconds: float  # time limit of a start, and of loading weights
    restores: bool = True  # a server that lost the weights gets them from here; False: from the first rank of the run
    state: ReplicaState = field(default=ReplicaState.DOWN, init=False)
    joins: int = field(default=0, init=False)  # how often it answered and was checked; its processes may differ
    description: Description | None = field(default=None, init=False)  # of the server, known once it has joined
    _joining: "asyncio.Task[None] | None" = field(default=None, init=False)

    @property
    def ready(self) -> bool:
        """Whether it serves requests with the current weights."""
        return self.state is ReplicaState.READY

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.client.url

    def computes(self, lora: LoraSettings | None) -> bool:
        """Whether the server was started for adapters of this rank."""
        return lora is not None and self.description is not None and self.description.lora_rank >= lora.rank

    async def open(self) -> None:
        """Join for the first time. A server with the weights of an earlier run gets those of the first update."""
        if self.process is not None:
            self.process.start()
        try:
            await asyncio.shield(self.join())
        except SamplerError:
            if self.state is not ReplicaState.AWAITS_WEIGHTS:
                raise

    def join(self, failed: str | None = None) -> "asyncio.Task[None]":
        """Wait for its answer and give it the weights, in a task that callers share: shield it.

        ``failed``: how a warning says that it failed; None: there is none, since the caller awaits the task.
        """

        def done(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None and failed is not None:
                _LOG.warning("the vLLM server %s %s: %s", self.url, failed, error)

        if self._joining is None or self._joining.done():
            self.state = ReplicaState.DOWN
            self._joining = asyncio.create_task(self._join())
            self._joining.add_done_callback(done)
        return self._joining

    def fail(self, reason: object) -> None:
        """Drop it after no reply or one from wrong weights, until it answers and has the current ones."""
        if self.state is not ReplicaState.DOWN:
            _LOG.warning("the vLLM server %s failed: %s; it is dropped until it answers", self.url, reason)
            self.join("is gone")

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seconds: float) -> Reply:
        """Sample one reply; marks the replica as failed where it cannot be reached."""
        try:
            adapters = self.current_weights().adapters is not None
            return await self.client.generate(prompt_ids, params, seconds, adapters=adapters)
        except ServerUnreachable as error:
            self.fail(error)
            raise

    async def load(self, weights: WeightsLabel) -> None:
        """Load new weights; marks it as failed where it cannot be reached, or lost the weights below the adapters."""
        try:
            if weights.adapters is not None and weights.needs_base(held := await self.client.weights_label()):
                raise ServerUnreachable(f"updating {self.url}: it holds the weights {held}, those below are lost")
            await self._load_weights(weights, base=weights.adapters is None)
        except ServerUnreachable as error:
            self.fail(error)
            raise

    async def receive(self, label: str) -> None:
        """Drop all results of the old weights after these arrived over NCCL; it is then ready."""
        await self.client.renew(label)
        self.state = ReplicaState.READY

    async def close(self) -> None:
        """Close the connections, and end the server if the sampler started it."""
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
        await self.client.close()
        if self.process is not None:
            await asyncio.to_thread(self.process.stop)

    async def _join(self) -> None:
        await self._until_healthy()
        self.description = await self.client.describe()
        self._check(self.description)
        self.joins += 1
        deadline = asyncio.get_running_loop().time() + self.start_seconds
        while (label := await self.client.weights_label()) != (weights := self.current_weights()).label:
            base = weights.needs_base(label)
            if base and weights.folder is None:
                self.state = ReplicaState.AWAITS_WEIGHTS
                raise SamplerError(
                    f"bringing up {self.url}: it does not hold the current weights ({weights.label}), and there is no "
                    f"folder to load them from: it gets the next ones. Where servers may be lost, set "
                    f"server.weights=folder."
                )
            if self.restores:
                try:
                    await self._load_weights(weights, base=base)
                except SamplerError:
                    if weights == self.current_weights():  # else an update removed the folder meanwhile
                        raise
            elif asyncio.get_running_loop().time() > deadline:
                raise ServerUnreachable(
                    f"waiting for {self.url}: it holds the weights {label}, and the first rank of the run did not give "
                    f"it {weights.label} within {self.start_seconds:g} seconds (server.start_seconds); see its log"
                )
            else:
                await asyncio.sleep(POLL_SECONDS)
        self.state = ReplicaState.READY

    async def check_health(self) -> None:
        """Drop it if it does not answer or lacks the current weights; if it is down, wait for it again."""
        if self.ready:
            try:
                label = await self.client.weights_label()
            except SamplerError as error:
                label = str(error)
            if label != (current := self.current_weights().label):
                self.fail(f"it has the weights {label}, not {current}")
        elif self.state is ReplicaState.DOWN:
            self.join()

    async def _load_weights(self, weights: WeightsLabel, *, base: bool) -> None:
        """Have the server load the weights and take their label last: replies until then are known to be of others."""
        if base:
            await self.client.load_weights(str(weights.folder), self.start_seconds)
        if weights.adapters is not None:
            await self.client.load_adapters(weights.adapters, self.start_seconds)
        await self.client.renew(weights.label)

    async def _until_healthy(self) -> None:
        deadline = asyncio.get_running_loop().time() + self.start_seconds
        while not await self.client.healthy():
            if self.process is not None:
                self.process.check_alive(served=self.joins > 0)
            if asyncio.get_running_loop().time() > deadline:
                said = "If it has ended, see its log and start it again; a run without servers can be resumed then."
                if self.process is not None:
                    said = f"The end of its log:\n{self.process.log_excerpt()}"
                raise ServerUnreachable(
                    f"waiting for {self.url}: no sign of life within {self.start_seconds:g} seconds "
                    f"(server.start_seconds). {said}"
                )
            await asyncio.sleep(POLL_SECONDS)

    def _check(self, served: Description) -> None:
        """Refuse a server with another model or with log-probabilities of another distribution."""
        for key, value in self.shape.items():
            if served.shape.get(key) != value:
                raise SamplerError(
                    f"checking the model at {self.url}: its {key} is {served.shape.get(key)}, this run's is {value}. "
                    f"Start the server with this run's configuration: condensegrpo serve CONFIG."
                )
        if "processed_logprobs" not in served.logprobs_mode:
            raise SamplerError(
                f"checking {self.url}: its log-probabilities are {served.logprobs_mode}, wanted processed_logprobs, "
                f"those of the distribution sampled from. Start it with condensegrpo serve."
            )
