"""One of a sampler's servers, ours or somebody's: brought up, checked, given the weights, and brought up again."""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from condensegrpo.core.errors import SamplerError, ServerUnreachable
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.samplers.vllm_server.client import Description, Reply, ServerClient
from condensegrpo.samplers.vllm_server.process import ServerProcess

POLL_SECONDS = 0.25  # between two looks at a server that starts
PATIENCE = 4  # looks at a server of ours that runs and does not answer, before it is started anew
STARTED_WITH = "default"  # vLLM's label for the weights that a server was started with


class WeightsLabel(NamedTuple):
    """The weights that every reply must come from."""

    label: str
    folder: str | None  # that servers load them from; None: they have them from their start, or came over NCCL


class Replica:
    """A server that is ``ready``, or is being brought up by one task that all who need it wait for.

    Lives in one event loop. A server that was replaced, by us or by whoever runs it, has other weights than those
    wanted: it gets them before it is ready again, and every reply says which weights it was sampled with.
    """

    def __init__(
        self,
        client: ServerClient,
        child: ServerProcess | None,
        *,
        place: int,
        shape: Mapping[str, str],
        wanted: Callable[[], WeightsLabel],
        start_seconds: float,
    ) -> None:
        self._client = client
        self._child = child
        self._shape = shape
        self._wanted = wanted
        self._start_seconds = start_seconds
        self.place = place  # among the sampler's replicas; routes are made from it
        self._revival: asyncio.Task[None] | None = None
        self.ready = False
        self.awaits_weights = False  # it lives, and holds other weights than those wanted, which only the learner has
        self.starts = 0  # of a server of ours
        self.lives = 0  # how often it was found alive after it was lost; its processes are others then
        self.description: Description | None = None  # of the server, once it was ready

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._client.url

    @property
    def client(self) -> ServerClient:
        """Its calls."""
        return self._client

    def revive(self) -> "asyncio.Task[None]":
        """Bring it up, if that is not under way. The task may be awaited by many: shield it."""
        if self._revival is None or self._revival.done():
            self.ready = self.awaits_weights = False
            self._revival = asyncio.create_task(self._bring_up())
            self._revival.add_done_callback(_heard)
        return self._revival

    def fail(self) -> None:
        """It did not answer, or with the wrong weights: nobody may use it until it was brought up again."""
        if self.ready or self.awaits_weights:
            self.revive()

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, seconds: float) -> Reply:
        """Sample one reply; marks the replica as failed where it cannot be reached."""
        try:
            return await self._client.generate(prompt_ids, params, seconds)
        except ServerUnreachable:
            self.fail()
            raise

    async def load(self, weights: WeightsLabel) -> None:
        """Take new weights, if it is ready; marks it as failed where it cannot be reached."""
        try:
            await self._client.load(str(weights.folder), weights.label, self._start_seconds)
        except ServerUnreachable:
            self.fail()
            raise

    async def took(self, label: str) -> None:
        """It was given these weights over NCCL: what was computed with the old ones is forgotten, and it may serve."""
        await self._client.renew(label)
        self.awaits_weights, self.ready = False, True

    async def close(self) -> None:
        """Leave it alone; end it if it is ours."""
        if self._revival is not None:
            self._revival.cancel()
            await asyncio.gather(self._revival, return_exceptions=True)
        await self._client.close()
        if self._child is not None:
            await asyncio.to_thread(self._child.stop)

    async def _bring_up(self) -> None:
        if self._child is not None and not (self._child.running and await self._lives()):
            await asyncio.to_thread(self._child.start)
            self.starts += 1
            self._client.url = self._child.url
        await self._until_healthy()
        self.description = await self._client.describe()
        self._check(self.description)
        self.lives += 1
        while await self._client.weights_label() != (weights := self._wanted()).label:
            if weights.folder is None:
                self.awaits_weights = True
                raise SamplerError(
                    f"bringing up {self.url}: it does not hold the weights wanted ({weights.label}), and there is no "
                    f"folder to give them from: it gets the next ones. Where servers may be lost, set "
                    f"server.weights=folder."
                )
            await self._client.load(weights.folder, weights.label, self._start_seconds)
        self.ready = True

    async def _lives(self) -> bool:
        """Whether it answers at all. One connection that breaks is no reason to end a server."""
        for _ in range(PATIENCE):
            if await self._client.healthy():
                return True
            await asyncio.sleep(POLL_SECONDS)
        return False

    async def _until_healthy(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._start_seconds
        while not await self._client.healthy():
            if self._child is not None:
                self._child.check_alive()
            if asyncio.get_running_loop().time() > deadline:
                where = f". The end of its log:\n{self._child.last_words()}" if self._child is not None else ""
                raise ServerUnreachable(
                    f"waiting for {self.url}: no sign of life within {self._start_seconds:g} seconds "
                    f"(server.start_seconds){where}"
                )
            await asyncio.sleep(POLL_SECONDS)

    def _check(self, found: Description) -> None:
        """Refuse a server that serves another model or bends the distribution."""
        for key, value in self._shape.items():
            if found.shape.get(key) != value:
                raise SamplerError(
                    f"checking the model at {self.url}: its {key} is {found.shape.get(key)}, this run's is {value}. "
                    f"Start the server with this run's configuration: condensegrpo serve CONFIG."
                )
        if found.head_sizes is not None and found.head_size not in found.head_sizes:
            raise SamplerError(
                f"checking the model at {self.url}: its attention heads have {found.head_size} dimensions, and vLLM on "
                f"a CPU has kernels for {', '.join(map(str, found.head_sizes))}. A new model has hidden_size/heads of "
                f"them: change model.new.heads, or set sampler.name=transformers."
            )
        if "processed_logprobs" not in found.logprobs_mode:
            raise SamplerError(
                f"checking {self.url}: its log-probabilities are {found.logprobs_mode}, wanted processed_logprobs, "
                f"those of the distribution sampled from. Start it with condensegrpo serve."
            )


def _heard(task: "asyncio.Task[None]") -> None:
    """Take the exception of a revival that nobody waited for: asyncio would log it as lost."""
    if not task.cancelled():
        task.exception()
