"""A server in virtual time: continuous batching, keys and values, preemption and a prefix cache of the actual ids.

Between two events (a prompt is admitted, a reply ends, memory is full) all replies of the batch advance together, a
token a decoding step. The step grows with the cached tokens, which grow with every step, so that n steps of B replies
over C cached tokens take  n·a + c·B·n²/2  seconds, with a = step_seconds + B·sequence_seconds + c·C. Prompts are read
before decoding goes on, first come, first served.
"""

import asyncio
import heapq
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, sqrt

from condensegrpo.core.errors import ServerUnreachable
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.samplers.http_client import Body
from condensegrpo.samplers.vllm_server.client import Description, Reply
from condensegrpo.samplers.vllm_server.replica import STARTED_WITH
from condensegrpo.simulation.hardware import ServerTimes
from condensegrpo.simulation.workload import StandInPolicy

TOLERANCE = 1e-6  # of a decoding step


class State(StrEnum):
    """What a server does, or why it has nothing to do."""

    BUSY = "busy"  # at least one request is under way
    TOOLS = "tools"  # its trajectories are at their tools, or wait for the rollout engine
    TAIL = "tail"  # its trajectories have ended, those of other servers have not
    LEARNER = "learner"  # no batch may be sampled before the learner has taken a step
    WEIGHTS = "weights"  # new weights are loaded
    LOST = "lost"  # it does not answer


class ServerUsage:
    """The seconds of one server by state."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since = now()
        self.state = State.LEARNER
        self.seconds: defaultdict[State, float] = defaultdict(float)

    def enter(self, state: State) -> None:
        """A state begins; the seconds since the last call belong to the former one."""
        now = self._now()
        self.seconds[self.state] += now - self._since
        self.state, self._since = state, now


@dataclass(slots=True, eq=False)
class _Request:
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    done: asyncio.Future[None]
    hashes: list[int]  # of the whole blocks of the prompt
    generated: int = 0  # tokens before it was preempted
    joined: float = 0.0  # decoding steps of the server when it was admitted

    def cached(self, steps: float) -> float:
        """Tokens whose keys and values it holds."""
        return len(self.prompt_ids) + self.generated + steps - self.joined


class SimulatedServer:
    """Implements ``ServerCalls`` on the event loop of a simulation. The replies are the policy's."""

    def __init__(
        self,
        url: str,
        times: ServerTimes,
        policy: StandInPolicy,
        *,
        now: Callable[[], float],
        load_seconds: float,
    ) -> None:
        """Start with an empty cache.

        Args:
            policy: writes the replies; the time that they take is the server's.
            load_seconds: of an update of the weights.
        """
        self.url = url
        self.usage = ServerUsage(now)
        self.trajectories: set[str] = set()  # that it serves and that have not ended
        self.preemptions = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self._times, self._policy, self._now = times, policy, now
        self._load_seconds, self._label, self._lost = load_seconds, STARTED_WITH, False
        self._waiting: deque[_Request] = deque()
        self._running: list[tuple[float, int, _Request]] = []  # heap by the step in which each ends
        self._order = 0
        self._steps = 0.0  # decoding steps so far
        self._kv = 0.0  # tokens of keys and values of the running replies
        self._reading = 0.0  # seconds of prompts that were admitted and are not read yet
        self._updated = now()
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._blocks: OrderedDict[int, None] = OrderedDict()  # of the prefix cache, the least recently used first

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seconds: float, *, adapters: bool = False
    ) -> Reply:
        """Sample one reply.

        Raises:
            ServerUnreachable: it is lost, or took longer than ``seconds``.
        """
        del adapters  # take the same time
        self._check_reachable()
        generation = self._policy(prompt_ids, params)
        self.trajectories.add(params.trajectory)
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(
            _Request(prompt_ids, generation.token_ids, done, list(_block_hashes(prompt_ids, self._times.block)))
        )
        self.usage.enter(State.BUSY)
        self._reschedule_soon()
        try:
            async with asyncio.timeout(seconds):
                await done
        except TimeoutError:
            raise ServerUnreachable(f"{self.url} did not reply within {seconds:g} seconds") from None
        if self._policy.ends_with(generation):
            self.trajectories.discard(params.trajectory)
            if not self.trajectories and self.usage.state is State.TOOLS:  # it was the last one
                self.usage.enter(State.TAIL)
        self.output_tokens += len(generation.token_ids)
        return Reply(generation=generation, labels=(self._label,))

    async def load_weights(self, folder: str, seconds: float) -> None:
        """Take the time of an update."""
        del folder, seconds
        self._check_reachable()
        self.usage.enter(State.WEIGHTS)
        await asyncio.sleep(self._load_seconds)

    async def load_adapters(self, folder: str, seconds: float) -> None:
        """Take the time of an update of all weights, an upper bound."""
        await self.load_weights(folder, seconds)

    async def renew(self, label: str) -> None:
        """Drop the prefix cache, and set the label of the weights."""
        self._check_reachable()
        self._blocks.clear()
        self._label = label

    async def transfer(self, step: str, body: Body, seconds: float) -> None:
        """Part of a transfer over NCCL, whose time is that of ``load_weights``."""

    async def healthy(self) -> bool:
        """Whether it answers."""
        return not self._lost

    async def describe(self) -> Description:
        """A server of any model: the simulation has one."""
        return Description(
            shape={},
            logprobs_mode="processed_logprobs",
            max_model_len=self._times.kv_tokens,
            world_size=1,
            lora_rank=0,
            nccl=False,
        )

    async def weights_label(self) -> str:
        """The label of the current weights."""
        self._check_reachable()
        return self._label

    async def close(self) -> None:
        """There is nothing to close."""

    async def lose(self, seconds: float) -> None:
        """Answer nothing for a while; requests that were under way fail, and the weights are those of the start."""
        self._advance()
        self._lost = True
        self.usage.enter(State.LOST)
        for request in [*self._waiting, *(request for _, _, request in self._running)]:
            if not request.done.done():
                request.done.set_exception(ServerUnreachable(f"{self.url} is lost"))
        self._waiting.clear()
        self._running.clear()
        self._blocks.clear()
        self.trajectories.clear()
        self._kv = self._reading = 0.0
        self._label = STARTED_WITH
        await asyncio.sleep(seconds)
        self._lost = False
        self.usage.enter(State.TAIL)

    def idle_for(self, state: State) -> None:
        """Why it has nothing to do, while it has nothing to do."""
        if self.usage.state not in (State.BUSY, State.LOST):
            self.usage.enter(state)

    def _check_reachable(self) -> None:
        if self._lost:
            raise ServerUnreachable(f"{self.url} is lost")

    def _reschedule_soon(self) -> None:
        """Look at all requests of this moment together."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_soon(self._reschedule)

    def _reschedule(self) -> None:
        """Bring the server to this moment, and set a timer for its next event."""
        self._advance()
        self._end_replies()
        self._admit()
        while self._kv > self._times.kv_tokens and len(self._running) > 1:
            self._preempt()
        self._timer = None
        if self._running:
            self._timer = asyncio.get_running_loop().call_later(self._until_next(), self._reschedule)
        elif self.usage.state is State.BUSY:
            self.usage.enter(State.TOOLS if self.trajectories else State.TAIL)

    def _rates(self) -> tuple[float, float]:
        """a and c·B of the seconds of n steps, n·a + c·B·n²/2."""
        times, batch = self._times, len(self._running)
        step = times.step_seconds + batch * times.sequence_seconds + self._kv * times.cached_token_seconds
        return step, batch * times.cached_token_seconds

    def _advance(self) -> None:
        elapsed, self._updated = self._now() - self._updated, self._now()
        read = min(elapsed, self._reading)
        self._reading -= read
        if not self._running or (elapsed := elapsed - read) <= 0:
            return
        first, growth = self._rates()
        steps = elapsed / first if not growth else (sqrt(first**2 + 2 * growth * elapsed) - first) / growth
        self._steps += steps
        self._kv += steps * len(self._running)

    def _until_next(self) -> float:
        """Seconds until a reply ends or the memory is full."""
        full = (self._times.kv_tokens - self._kv) / len(self._running) if len(self._running) > 1 else inf
        steps = max(min(self._running[0][0] - self._steps, full + TOLERANCE), 0.0)
        first, growth = self._rates()
        return self._reading + steps * first + growth * steps**2 / 2

    def _end_replies(self) -> None:
        while self._running and self._running[0][0] <= self._steps + TOLERANCE:
            _, _, request = heapq.heappop(self._running)
            self._kv -= request.cached(self._steps)
            self._keep(request)
            if not request.done.done():  # else its caller has given up
                request.done.set_result(None)
        if not self._running:
            self._kv = 0.0  # without rounding errors

    def _admit(self) -> None:
        """Let requests in, in order, as far as there is room; the first one always."""
        while self._waiting and len(self._running) < self._times.sequences:
            request = self._waiting[0]
            tokens = len(request.prompt_ids) + request.generated
            if self._running and self._kv + tokens >= self._times.kv_tokens:
                return
            self._waiting.popleft()
            if request.done.done():
                continue
            cached = min(self._cached(request.hashes), tokens - 1)
            new, times = tokens - cached, self._times
            pairs = new * cached + new * (new + 1) / 2
            self._reading += times.prompt_seconds + new * times.prompt_token_seconds + pairs * times.pair_seconds
            self.prompt_tokens += tokens
            self.cached_tokens += cached
            request.joined = self._steps
            self._kv += tokens
            self._order += 1
            end = self._steps + len(request.output_ids) - request.generated
            heapq.heappush(self._running, (end, self._order, request))

    def _preempt(self) -> None:
        """Put the newest request back to the front, to be read again with what it has sampled: vLLM's recomputation."""
        newest = max(self._running, key=lambda entry: entry[1])
        self._running.remove(newest)
        heapq.heapify(self._running)
        request = newest[2]
        self._kv -= request.cached(self._steps)
        request.generated += int(self._steps - request.joined)
        self._waiting.appendleft(request)
        self.preemptions += 1

    def _cached(self, hashes: Sequence[int]) -> int:
        """Tokens at the start of a prompt that are in the prefix cache, which are now the most recently used."""
        hits = 0
        for block in hashes:
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            hits += 1
        return hits * self._times.block

    def _keep(self, request: _Request) -> None:
        """Add the blocks of a prompt and its reply to the prefix cache, in the memory that running replies leave."""
        size, prompt = self._times.block, len(request.prompt_ids)
        start = len(request.hashes) * size
        rest = (*request.prompt_ids[start:prompt], *request.output_ids)
        last = request.hashes[-1] if request.hashes else 0
        for block in (*request.hashes, *_block_hashes(rest, size, after=last)):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        room = max(0, int((self._times.kv_tokens - self._kv) // size))
        while len(self._blocks) > room:
            self._blocks.popitem(last=False)


def _block_hashes(ids: Sequence[int], size: int, *, after: int = 0) -> Iterator[int]:
    """A hash of each whole block and everything before it, as vLLM's prefix cache has it."""
    flat = tuple(ids)
    for start in range(0, len(flat) - size + 1, size):
        after = hash((after, flat[start : start + size]))
        yield after
