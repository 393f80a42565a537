"""One server of a sampler, started by it or not: bring it up, check it, update its weights, bring it up again."""

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
PATIENCE = 4  # health checks of a running server of the sampler that does not answer, before it is restarted
STARTED_WITH = "default"  # vLLM's label for the weights that a server was started with


class WeightsLabel(NamedTuple):
    """The weights that every reply must come from."""

    label: str  # run:version
    folder: str | None  # that servers load them from; None: they started with them, or received them over NCCL
    adapters: str | None = None  # the PEFT folder of what comes beside the weights

    def shares_base_with(self, other: str) -> bool:
        """Whether the weights of another label have the same base, so that only the adapters differ."""
        return self.adapters is not None and other.partition(":")[0] == self.label.partition(":")[0]


class ReplicaState(Enum):
    """The states of a server.

    DOWN ──brought up──▶ READY ──fails──▶ DOWN
    DOWN ──brought up, no folder to load from──▶ AWAITS_WEIGHTS ──weights received──▶ READY
                                                 AWAITS_WEIGHTS ──fails──▶ DOWN
    """

    DOWN = auto()  # not brought up yet, or failed; a task may be bringing it up
    AWAITS_WEIGHTS = auto()  # it runs with old weights, and only the learner has the current ones
    READY = auto()  # it runs with the current weights


@dataclass(kw_only=True, eq=False)
class Replica:
    """A server that is ready, or is brought up by one task that all its callers await.

    Use it in one event loop. A restarted server holds other weights than the current ones: it gets those before it is
    ready again, and every reply has the label of the weights it was sampled with.
    """

    client: ServerClient
    process: ServerProcess | None  # that the sampler started; None: it runs elsewhere
    index: int  # among the sampler's replicas; determines which trajectories it serves
    shape: Mapping[str, str]  # of the model that it must serve
    current_weights: Callable[[], WeightsLabel]
    start_seconds: float  # time limit of a start, and of loading weights
    restores: bool = True  # a server that lost the weights gets them from here; False: from the first rank of the run
    state: ReplicaState = field(default=ReplicaState.DOWN, init=False)
    starts: int = field(default=0, init=False)  # by the sampler
    revivals: int = field(default=0, init=False)  # how often it was brought up; its processes differ each time
    description: Description | None = field(default=None, init=False)  # of the server, known once it was brought up
    _revival: "asyncio.Task[None] | None" = field(default=None, init=False)

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

    def revive(self) -> "asyncio.Task[None]":
        """Start to bring it up unless it is already being brought up. Callers share the task: shield it."""
        if self._revival is None or self._revival.done():
            self.state = ReplicaState.DOWN
            self._revival = asyncio.create_task(self._bring_up())
            self._revival.add_done_callback(
                lambda task: task.cancelled() or task.exception()  # no caller awaits it, and asyncio would log it
            )
        return self._revival

    def fail(self, reason: object) -> None:
        """Mark it as failed after no reply or one from wrong weights: it is unused until it is brought up again."""
        if self.state is not ReplicaState.DOWN:
            restarts = "it is restarted if it does not answer" if self.process is not None else "restart it if it ended"
            _LOG.warning("the vLLM server %s failed: %s; %s", self.url, reason, restarts)
            self.revive()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seconds: float) -> Reply:
        """Sample one reply; marks the replica as failed where it cannot be reached."""
        try:
            adapters = self.current_weights().adapters is not None
            return await self.client.generate(prompt_ids, params, seconds, adapters=adapters)
        except ServerUnreachable as error:
            self.fail(error)
            raise

    async def load(self, weights: WeightsLabel) -> None:
        """Load new weights; marks it as failed where it cannot be reached."""
        try:
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
        if self._revival is not None:
            self._revival.cancel()
            await asyncio.gather(self._revival, return_exceptions=True)
        await self.client.close()
        if self.process is not None:
            await asyncio.to_thread(self.process.stop)

    async def _bring_up(self) -> None:
        if self.process is not None and not (self.process.running and await self._answers()):
            await asyncio.to_thread(self.process.start)
            self.starts += 1
            self.client.url = self.process.url
        await self._until_healthy()
        self.description = await self.client.describe()
        self._check(self.description)
        self.revivals += 1
        deadline = asyncio.get_running_loop().time() + self.start_seconds
        while (label := await self.client.weights_label()) != (weights := self.current_weights()).label:
            base = not weights.shares_base_with(label)
            if weights.adapters is not None and weights.folder is None and label == STARTED_WITH:
                base = False
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

    async def look_after(self) -> None:
        """Start to bring it up again if it does not answer, or does not hold the current weights."""
        if self.ready:
            try:
                label = await self.client.weights_label()
            except SamplerError as error:
                label = str(error)
            if label != (current := self.current_weights().label):
                self.fail(f"it has the weights {label}, not {current}")
        elif self.state is ReplicaState.DOWN:
            self.revive()

    async def _load_weights(self, weights: WeightsLabel, *, base: bool) -> None:
        """Have the server load the weights and take their label last: replies until then are known to be of others."""
        if base:
            await self.client.load_weights(str(weights.folder), self.start_seconds)
        if weights.adapters is not None:
            await self.client.load_adapters(weights.adapters, self.start_seconds)
        await self.client.renew(weights.label)

    async def _answers(self) -> bool:
        """Whether it answers within some attempts: a broken connection is no reason to end a server."""
        for _ in range(PATIENCE):
            if await self.client.healthy():
                return True
            await asyncio.sleep(POLL_SECONDS)
        return False

    async def _until_healthy(self) -> None:
        deadline = asyncio.get_running_loop().time() + self.start_seconds
        while not await self.client.healthy():
            if self.process is not None:
                self.process.check_alive()
            if asyncio.get_running_loop().time() > deadline:
                where = f". The end of its log:\n{self.process.log_excerpt()}" if self.process is not None else ""
                raise ServerUnreachable(
                    f"waiting for {self.url}: no sign of life within {self.start_seconds:g} seconds "
                    f"(server.start_seconds){where}"
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
