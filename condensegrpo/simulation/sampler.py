"""The sampler of a simulation: the request balancing and weight updates of ``vllm_server``, over simulated servers."""

import asyncio
from collections.abc import Callable, Sequence
from zlib import crc32

from condensegrpo.core.protocols.sampler import NamedTensors
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.samplers.vllm_server.pool import ReplicaPool
from condensegrpo.samplers.vllm_server.replica import STARTED_WITH, WeightsLabel
from condensegrpo.samplers.vllm_server.settings import RequestSettings
from condensegrpo.simulation.clock import VirtualClock
from condensegrpo.simulation.cluster import ClusterPlan
from condensegrpo.simulation.server import SimulatedServer


class EngineProcesses:
    """The processes that play episodes: each does one thing at a time."""

    def __init__(self, clock: VirtualClock, *, processes: int, turn_seconds: float) -> None:
        self._clock, self._turn_seconds = clock, turn_seconds
        self._free_at = [0.0] * processes
        self.busy_seconds = self.waited_seconds = 0.0  # of all turns

    async def turn(self, trajectory: str) -> None:
        """Take the processor time of a turn, after the turns that came before; a group has one process."""
        process = crc32(trajectory.rpartition("/")[0].encode()) % len(self._free_at)
        now = self._clock.now
        begins = max(now, self._free_at[process])
        self._free_at[process] = begins + self._turn_seconds
        self.busy_seconds += self._turn_seconds
        self.waited_seconds += begins - now
        await asyncio.sleep(self._free_at[process] - now)


class SimulatedSampler:
    """Samples from simulated servers."""

    def __init__(
        self,
        clock: VirtualClock,
        plan: ClusterPlan,
        engine: EngineProcesses,
        make_server: Callable[[int], SimulatedServer],
    ) -> None:
        """Bring all servers up."""
        self.version = 0
        self.servers: list[SimulatedServer] = []
        self._clock, self._plan, self._engine = clock, plan, engine
        self._pool = ReplicaPool(WeightsLabel(label=STARTED_WITH, folder="simulated"), RequestSettings())

        def client(url: str, _: str) -> SimulatedServer:
            self.servers.append(make_server(int(url)))
            return self.servers[-1]

        urls = [(str(index), None) for index in range(plan.servers)]
        clock.run(self._pool.open(urls, token="", shape={}, start_seconds=3600.0, client=client))
        for loss in plan.cluster.losses:
            clock.submit(self._lose(self.servers[loss.server], loss.at, loss.seconds))

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply, after the engine's own work on it."""
        await self._engine.turn(params.trajectory)
        return await self._pool.sample(prompt_ids, params)

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Have all servers load the weights of a step."""
        self.stage_weights(named_tensors, version)()

    def stage_weights(self, named_tensors: NamedTensors, version: int) -> Callable[[], None]:
        """Take the time of writing them; the call that it returns takes that of loading."""
        del named_tensors
        self._clock.run(asyncio.sleep(self._plan.stage_seconds))

        def update() -> None:
            self._clock.run(self._pool.load(WeightsLabel(label=f"simulated:{version}", folder="simulated")))
            self.version = version

        return update

    def close(self) -> None:
        """Close the pool."""
        self._clock.run(self._pool.close())

    @staticmethod
    async def _lose(server: SimulatedServer, at: float, seconds: float) -> None:
        await asyncio.sleep(at)
        await server.lose(seconds)
