"""The sampler of a simulation: the request balancing and weight updates of ``vllm_server``, over simulated servers."""

import asyncio
from collections.abc import Callable, Sequence
from zlib import crc32

from condensegrpo.core.protocols.sampler import NamedTensors
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.samplers.vllm.settings import RequestSettings
from condensegrpo.samplers.vllm_server.pool import ReplicaPool
from condensegrpo.samplers.vllm_server.replica import STARTED_WITH, WeightsLabel
from condensegrpo.simulation.clock import VirtualClock
from condensegrpo.simulation.cluster import ClusterPlan
from condensegrpo.simulation.server import SimulatedServer
from condensegrpo.simulation.workload import StandInPolicy


class EngineProcesses:
    """The processes that play episodes: each does one thing at a time."""

    def __init__(self, clock: VirtualClock, plan: ClusterPlan) -> None:
        self._clock, self._turn_seconds = clock, plan.cluster.engine.turn_seconds
        self._free_at = [0.0] * plan.engine_processes
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

    def __init__(self, clock: VirtualClock, plan: ClusterPlan, policy: StandInPolicy) -> None:
        """Bring all servers up."""
        self.version = 0
        self.servers: list[SimulatedServer] = []
        self.clock, self.plan, self.engine = clock, plan, EngineProcesses(clock, plan)
        self._pool = ReplicaPool(WeightsLabel(label=STARTED_WITH, folder="simulated"), RequestSettings())

        def client(url: str, _: str) -> SimulatedServer:
            server = SimulatedServer(url, plan.times, policy, now=lambda: clock.now, load_seconds=plan.load_seconds)
            self.servers.append(server)
            return server

        urls = [(f"simulated:{index}", None) for index in range(plan.servers)]
        clock.run(self._pool.open(urls, token="", shape={}, start_seconds=3600.0, client=client))
        for loss in plan.cluster.losses:
            clock.submit(self._lose(self.servers[loss.server], loss.at, loss.seconds))

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply, after the engine's own work on it."""
        await self.engine.turn(params.trajectory)
        return await self._pool.sample(prompt_ids, params)

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Have all servers load the weights of a step."""
        self.stage_weights(named_tensors, version)()

    def stage_weights(self, named_tensors: NamedTensors, version: int) -> Callable[[], None]:
        """Take the time of writing them; the call that it returns takes that of loading."""
        del named_tensors
        self.clock.run(asyncio.sleep(self.plan.stage_seconds))

        def update() -> None:
            self.clock.run(self._pool.load(WeightsLabel(label=f"simulated:{version}", folder="simulated")))
            self.version = version

        return update

    def close(self) -> None:
        """Close the pool."""
        self.clock.run(self._pool.close())

    @staticmethod
    async def _lose(server: SimulatedServer, at: float, seconds: float) -> None:
        await asyncio.sleep(at)
        await server.lose(seconds)
