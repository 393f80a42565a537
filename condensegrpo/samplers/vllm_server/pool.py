"""The servers of a sampler: which one gets a request, what is retried, how they take weights, are lost and return."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple
from zlib import crc32

from condensegrpo.core.errors import SamplerError, ServerUnreachable
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.samplers.http_client import retried
from condensegrpo.samplers.vllm.settings import RequestSettings
from condensegrpo.samplers.vllm_server.client import Description, ServerClient
from condensegrpo.samplers.vllm_server.process import ServerProcess

_LOG = logging.getLogger(__name__)
POLL_SECONDS = 0.25  # between two health checks of a server that starts
WATCH_SECONDS = 2.0  # between two looks of the first rank at servers that several ranks share
CONNECT_SECONDS = 5.0  # that a client waits for servers to answer before it samples from those that did
PAUSE_SECONDS = 0.2  # before the first retry of a request; doubled before each further retry
STARTED_WITH = "default"  # vLLM's label for the weights that a server was started with


class WeightsLabel(NamedTuple):
    """The weights that every reply must come from."""

    label: str  # run:update:version, another one with every update
    folder: str | None  # that servers load them from; None: they started with them, or received them over NCCL
    adapters: str | None = None  # the PEFT folder of what comes beside the weights

    def needs_base(self, held: str) -> bool:
        """Whether more than the adapters must be loaded into a server whose weights have the label ``held``."""
        if self.adapters is None:
            return True
        if self.folder is None and held == STARTED_WITH:
            return False
        return held.partition(":")[0] != self.label.partition(":")[0]


@dataclass(eq=False)
class Replica:
    """A server: down, running with other weights than the current ones, or ready.

    It **joins** in one task that all its callers await: it answers, is checked, and gets the current weights unless it
    holds them. Every update reaches it so, and so it returns after it was lost. No process is started again here.
    """

    pool: "ReplicaPool"
    client: ServerClient
    process: ServerProcess | None  # that the sampler started; None: it runs elsewhere
    ready: bool = field(default=False, init=False)  # it has joined and holds the current weights
    description: Description | None = field(default=None, init=False)  # None: it is down, or has not joined yet
    joins: int = field(default=0, init=False)  # how often it answered and was checked; its processes may differ
    under_way: int = field(default=0, init=False)  # requests
    _joining: "asyncio.Task[None] | None" = field(default=None, init=False)

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.client.url

    async def open(self) -> None:
        """Join for the first time. A server with the weights of an earlier run gets those of the first update."""
        if self.process is not None:
            self.process.start()
        try:
            await asyncio.shield(self.join())
        except SamplerError:
            if self.description is None:
                raise

    def join(self, failed: str = "") -> "asyncio.Task[None]":
        """Wait for its answer and give it the weights, in a task that callers share: shield it.

        ``failed``: how a warning says that it failed; empty: there is none, since the caller awaits the task.
        """

        def done(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None and failed:
                _LOG.warning("the vLLM server %s %s: %s", self.url, failed, error)

        if self._joining is None or self._joining.done():
            self.ready, self.description = False, None
            self._joining = asyncio.create_task(self._join())
            self._joining.add_done_callback(done)
        return self._joining

    def fail(self, reason: object) -> None:
        """Drop it after no reply or one from wrong weights, until it answers and has the current ones."""
        if self.description is not None and self in self.pool.replicas:  # else it has left
            _LOG.warning("the vLLM server %s failed: %s; it is dropped until it answers", self.url, reason)
            self.join("is gone")

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, seconds: float) -> Generation:
        """Sample one reply under the current weights; marks the replica as failed where there is none."""
        adapters = self.pool.weights.adapters is not None
        self.under_way += 1
        try:
            reply = await self.client.generate(prompt_ids, params, seconds, adapters=adapters)
            if set(reply.labels) != {(label := self.pool.weights.label)}:
                raise ServerUnreachable(f"{self.url} sampled with the weights {reply.labels}, not {label}")
            return reply.generation
        except ServerUnreachable as error:
            self.fail(error)
            raise
        finally:
            self.under_way -= 1

    async def receive(self, label: str) -> None:
        """Drop all results of the old weights after these arrived over NCCL; it is then ready."""
        await self.client.renew(label)
        self.ready = True

    async def is_alive(self) -> bool:
        """Whether it has joined and runs, a ready one with the current weights; else it is dropped until it joins."""
        if self.description is None:
            self.join()
            return False
        try:
            if not await self.client.healthy():
                raise ServerUnreachable("it does not answer")
            label = await self.client.weights_label()
            if self.ready and label != (current := self.pool.weights.label):
                raise ServerUnreachable(f"it has the weights {label}, not {current}")
        except SamplerError as error:
            self.fail(error)
            return False
        return True

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
        now, seconds = asyncio.get_running_loop().time, self.pool.start_seconds
        description = await self.client.describe(seconds)
        self._check(description)
        self.joins += 1
        deadline = now() + seconds
        while (label := await self.client.weights_label()) != (weights := self.pool.weights).label:
            base = weights.needs_base(label)
            if base and weights.folder is None:
                self.description = description
                raise SamplerError(
                    f"bringing up {self.url}: it does not hold the current weights ({weights.label}), and there is no "
                    f"folder to load them from: it gets the next ones. Where servers may be lost, set "
                    f"server.weights=folder."
                )
            if self.pool.gives_weights:
                try:
                    if base:
                        await self.client.load_weights(str(weights.folder), seconds)
                    if weights.adapters is not None:
                        await self.client.load_adapters(weights.adapters, seconds)
                    await self.client.renew(weights.label)  # last: replies until then are known to be of others
                except SamplerError:
                    if weights == self.pool.weights:  # else an update removed the folder meanwhile
                        raise
            elif now() > deadline:
                raise ServerUnreachable(
                    f"waiting for {self.url}: it holds the weights {label}, and the first rank of the run did not give "
                    f"it {weights.label} within {seconds:g} seconds (server.start_seconds); see its log"
                )
            else:
                await asyncio.sleep(POLL_SECONDS)
        self.ready, self.description = True, description

    async def _until_healthy(self) -> None:
        seconds = self.pool.start_seconds
        try:
            async with asyncio.timeout(seconds):
                while not await self.client.healthy():
                    if self.process is not None:
                        self.process.check_alive(served=self.joins > 0)
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError as error:
            said = "If it has ended, see its log and start it again; a run without servers can be resumed then."
            if self.process is not None:
                said = f"The end of its log:\n{self.process.log_excerpt()}"
            raise ServerUnreachable(
                f"waiting for {self.url}: no sign of life within {seconds:g} seconds (server.start_seconds). {said}"
            ) from error

    def _check(self, served: Description) -> None:
        """Refuse a server with another model or with log-probabilities of another distribution."""
        for key, value in self.pool.shape.items():
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


@dataclass(kw_only=True, eq=False)
class ReplicaPool:
    """Replicas that serve one policy. All its coroutines run in one event loop; ``close`` in the same."""

    weights: WeightsLabel  # that every reply must come from
    requests: RequestSettings
    token: str = field(repr=False)
    shape: Mapping[str, str]  # of the model that each must serve, see ``server.shape_of``
    start_seconds: float  # time limit of a start, and of loading weights
    gives_weights: bool = True  # updates and lost weights come from here; False: from the first rank of several
    client: Callable[[str, str], ServerClient] = ServerClient  # makes the calls of a server, of its URL and the token
    replicas: tuple[Replica, ...] = field(default=(), init=False)
    _home: dict[str, Replica] = field(default_factory=dict, init=False)  # of each trajectory since the last weights
    _update: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def open(self, servers: Iterable[tuple[str, ServerProcess | None]]) -> None:
        """Start servers that have a process and connect to all; raises the error of the first that fails."""
        self.replicas = tuple(Replica(self, self.client(url, self.token), process) for url, process in servers)
        await asyncio.gather(*(replica.open() for replica in self.replicas))

    async def connect(self, urls: Sequence[str]) -> None:
        """Connect to servers that have the weights; one that does not answer at once joins later."""
        await self.follow(urls)
        await asyncio.wait([replica.join() for replica in self.replicas], timeout=CONNECT_SECONDS)

    async def follow(self, urls: Sequence[str]) -> None:
        """Sample from these running servers from now on. No request may be under way.

        A new server serves when it has the current weights. The connections to those that are not among them are
        closed.
        """
        async with self._update:
            known = {replica.url: replica for replica in self.replicas}
            added = {url: Replica(self, self.client(url, self.token), None) for url in urls if url not in known}
            self.replicas = tuple((known | added)[url] for url in urls)
            self._home.clear()
            for replica in added.values():
                _LOG.info("the vLLM server %s joins the run", replica.url)
                replica.join("did not join the run")
            for replica in known.values():
                if replica not in self.replicas:
                    _LOG.info("the vLLM server %s leaves the run", replica.url)
                    await replica.close()

    async def watch(self, seconds: float = WATCH_SECONDS) -> None:
        """Look after the servers for ever: one that no request of this rank goes to may be lost to the others."""
        while True:
            await asyncio.sleep(seconds)
            async with self._update:
                await self.running()

    @property
    def room(self) -> int | None:
        """Tokens of prompt and output that every server takes; None: no server has reported it."""
        return min((each.description.max_model_len for each in self.replicas if each.description), default=None)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply under the current weights, from the trajectory's server or, if that is gone, from another."""

        async def attempt() -> Generation:
            replica = await self._pick(params.trajectory)
            return await replica.generate(prompt_ids, params, self.requests.seconds)

        return await retried(attempt, retries=self.requests.retries, pause=PAUSE_SECONDS)

    async def running(self) -> list[Replica]:
        """The replicas that have joined and run now; the others join again."""
        alive = await asyncio.gather(*(replica.is_alive() for replica in self.replicas))
        return list(compress(self.replicas, alive))

    async def load(self, weights: WeightsLabel) -> None:
        """Have the running servers load new weights; if none does, wait for any. Others load them when they answer."""
        async with self._update:
            await self.running()  # drops those that are lost
            before = self.weights
            self.hold(weights)
            try:
                failures = await _all_joined(each for each in self.replicas if each.description is not None)
                if refusals := [error for error in failures if not isinstance(error, ServerUnreachable)]:
                    raise refusals[0]
                for replica in self.replicas:
                    if not replica.ready:  # at once: servers that the sampler started have no watch
                        replica.join("is gone")
                if not any(replica.ready for replica in self.replicas):
                    failures = await _all_joined(self.replicas)
                    if len(failures) == len(self.replicas):
                        raise failures[0]
            except BaseException:
                self.weights = before
                raise

    def hold(self, weights: WeightsLabel) -> None:
        """Sample under these weights from now on: the servers have them."""
        self.weights = weights
        self._home.clear()

    async def close(self) -> None:
        """End the processes that the sampler started and all connections. May be called twice."""
        replicas, self.replicas = self.replicas, ()
        await asyncio.gather(*(replica.close() for replica in replicas))

    async def _pick(self, trajectory: str) -> Replica:
        """The trajectory's replica: at first, or if that is gone, the ready one with the fewest requests under way.

        Equal ones are taken in an order of the trajectory's own: ranks that share servers begin at different ones. If
        none is ready, the request waits for the first that is.
        """
        home = self._home.get(trajectory)
        if home is not None and home.ready:
            return home
        while not any(replica.ready for replica in self.replicas):
            await self._first_joined()
        first = crc32(trajectory.encode()) % len(self.replicas)
        in_order = (*self.replicas[first:], *self.replicas[:first])
        home = min((each for each in in_order if each.ready), key=lambda each: each.under_way)
        if trajectory:
            self._home[trajectory] = home
        return home

    async def _first_joined(self) -> None:
        """Wait until the first replica has joined; raises the last error if none does."""
        joining, errors = {replica.join() for replica in self.replicas}, list[BaseException | None]()
        while joining and None not in errors:
            joined, joining = await asyncio.wait(joining, return_when=asyncio.FIRST_COMPLETED)
            errors += [task.exception() for task in joined]
        if None not in errors:
            raise errors[-1] if errors and errors[-1] else SamplerError("sampling a reply: the sampler was closed")


async def _all_joined(replicas: Iterable[Replica]) -> list[BaseException]:
    """The errors of the replicas that join now and fail."""
    joining = [replica.join("did not take the weights") for replica in replicas]
    await asyncio.gather(*map(asyncio.shield, joining), return_exceptions=True)
    return [error for task in joining if (error := task.exception()) is not None]
