"""The servers of a sampler: which server gets a request, what is retried, and how all of them take new weights."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from zlib import crc32

from condensegrpo.core.errors import SamplerError, ServerUnreachable
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.samplers.http_client import retried
from condensegrpo.samplers.vllm.settings import RequestSettings
from condensegrpo.samplers.vllm_server.client import ServerClient
from condensegrpo.samplers.vllm_server.process import ServerProcess
from condensegrpo.samplers.vllm_server.replica import Replica, WeightsLabel

_LOG = logging.getLogger(__name__)
WATCH_SECONDS = 2.0  # between two looks of the first rank at servers that several ranks share
CONNECT_SECONDS = 5.0  # that a client waits for servers to answer before it samples from those that did
PAUSE_SECONDS = 0.2  # before the first retry of a request; doubled before each further retry


class ReplicaPool:
    """Replicas that serve one policy. All its coroutines run in one event loop; ``close`` in the same."""

    def __init__(self, weights: WeightsLabel, requests: RequestSettings, *, restores: bool = True) -> None:
        """Know no server yet.

        Args:
            restores: whether a server that lost the weights gets them from here; False: from the first rank of several
                that share the servers, whose pool watches over them.
        """
        self.weights = weights  # that every reply must come from
        self.replicas: tuple[Replica, ...] = ()
        self._requests = requests
        self._restores = restores
        self._home: dict[str, Replica] = {}  # of each trajectory since the last weights, where its prefix is cached
        self._under_way: Counter[int] = Counter()  # requests by index of the replica
        self._update = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    async def open(
        self,
        servers: Sequence[tuple[str, ServerProcess | None]],
        *,
        token: str,
        shape: Mapping[str, str],
        start_seconds: float,
        client: Callable[[str, str], ServerClient] = ServerClient,
    ) -> None:
        """Start and connect to the servers; raises the error of the first that fails.

        Args:
            servers: the URL of each, and its process if the sampler starts it.
            shape: of the model that each must serve, see ``server.shape_of``.
            start_seconds: time limit of a start, and of loading weights.
            client: makes the calls of a server, of its URL and the token.
        """

        def replica(url: str, process: ServerProcess | None) -> Replica:
            return Replica(
                client=client(url, token),
                process=process,
                index=next(numbers),
                shape=shape,
                current_weights=lambda: self.weights,
                start_seconds=start_seconds,
                restores=self._restores,
            )

        numbers, self._replica = count(), replica
        self.replicas = tuple(replica(url, process) for url, process in servers)
        await asyncio.gather(*(each.open() for each in self.replicas))

    async def connect(
        self,
        urls: Sequence[str],
        *,
        token: str,
        shape: Mapping[str, str],
        start_seconds: float,
        client: Callable[[str, str], ServerClient],
    ) -> None:
        """Connect to servers that have the weights; one that does not answer at once joins later."""
        await self.open((), token=token, shape=shape, start_seconds=start_seconds, client=client)
        await self.follow(urls)
        await asyncio.wait([replica.join() for replica in self.replicas], timeout=CONNECT_SECONDS)

    async def follow(self, urls: Sequence[str]) -> None:
        """Sample from these running servers from now on. No request may be under way.

        A new server serves when it has the current weights. The connections to those that are not among them are
        closed.
        """
        async with self._update:
            added = [self._replica(url, None) for url in urls if url not in {replica.url for replica in self.replicas}]
            removed = [replica for replica in self.replicas if replica.url not in urls]
            self.replicas = (*(replica for replica in self.replicas if replica not in removed), *added)
            self._home.clear()
            for replica in added:
                _LOG.info("the vLLM server %s joins the run", replica.url)
                replica.join("did not join the run")
            for replica in removed:
                _LOG.info("the vLLM server %s leaves the run", replica.url)
                await replica.close()

    async def watch(self, seconds: float = WATCH_SECONDS) -> None:
        """Look after the servers from now on: one that no request of this rank goes to may be lost to the others."""

        async def look() -> None:
            while True:
                await asyncio.sleep(seconds)
                async with self._update:
                    await asyncio.gather(*(replica.check_health() for replica in self.replicas))

        self._watch = asyncio.create_task(look())

    @property
    def room(self) -> int | None:
        """Tokens of prompt and output that every server takes; None: no server has reported it."""
        return min((each.description.max_model_len for each in self.replicas if each.description), default=None)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply under the current weights, from the trajectory's server or, if that is gone, from another."""

        async def attempt(number: int) -> Generation:
            replica = await self._pick(params.trajectory, number)
            self._under_way[replica.index] += 1
            try:
                reply = await replica.generate(prompt_ids, params, self._requests.seconds)
            finally:
                self._under_way[replica.index] -= 1
            if set(reply.labels) != {self.weights.label}:
                stale = f"{replica.url} sampled with the weights {reply.labels}, not {self.weights.label}"
                replica.fail(SamplerError(stale))
                raise ServerUnreachable(stale)
            return reply.generation

        return await retried(attempt, retries=self._requests.retries, pause=PAUSE_SECONDS)

    async def load(self, weights: WeightsLabel) -> None:
        """Have the ready servers load new weights; the others load them when they answer again."""
        async with self._update:
            before, self.weights = self.weights, weights
            self._home.clear()
            try:
                await self._load()
            except BaseException:
                self.weights = before
                raise

    def hold(self, weights: WeightsLabel) -> None:
        """Sample under these weights from now on: the servers have them."""
        self.weights = weights
        self._home.clear()

    async def close(self) -> None:
        """End the processes that the sampler started and all connections. May be called twice."""
        if self._watch is not None:
            self._watch.cancel()
        replicas, self.replicas = self.replicas, ()
        await asyncio.gather(*(replica.close() for replica in replicas))

    async def _load(self) -> None:
        ready = [replica for replica in self.replicas if replica.ready]
        results = await asyncio.gather(*(replica.load(self.weights) for replica in ready), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ServerUnreachable):
                raise result
        joining = [replica.join() for replica in self.replicas if not replica.ready]
        if len(joining) == len(self.replicas):
            results = await asyncio.gather(*map(asyncio.shield, joining), return_exceptions=True)
            failures = [result for result in results if isinstance(result, BaseException)]
            if len(failures) == len(results):
                raise failures[0]

    async def _pick(self, trajectory: str, attempt: int) -> Replica:
        """The trajectory's replica: at first, or if that is gone, the ready one with the fewest requests under way.

        Equal ones are taken in an order of the trajectory's own: ranks that share servers begin at different ones. If
        none is ready, the request waits for one.
        """
        home = self._home.get(trajectory)
        if home is not None and home.ready:
            return home
        start, size = crc32(trajectory.encode()), len(self.replicas)
        ready = [replica for replica in self.replicas if replica.ready]
        if ready:
            home = min(ready, key=lambda each: (self._under_way[each.index], (each.index + start) % size))
        else:
            home = self.replicas[(start + attempt) % size]
            await asyncio.shield(home.join())
        if trajectory:
            self._home[trajectory] = home
        return home
