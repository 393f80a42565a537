"""What worker processes gain where tools compute: wall time and CPU time with none, one, two, … of them.

    python benchmarks/rollout_workers.py --workers 0 1 2 --rounds 5

A sampler in the process of the rank answers at once; in every turn the policy calls a tool that computes for some
milliseconds. Numbers of workers take turns within a round, and medians over the rounds are printed: wall seconds of a
batch, CPU seconds of the busiest worker (what the wall time would be on as many free cores), CPU microseconds of the
rank for each request, and both as a ratio to one worker.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from engine import ANSWER, SAMPLES, Instant
from rollout_world import WORDS, Readings, World
from tables import show

from condensegrpo.condensers.whole_units import LastK
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.group import ProblemGroup, problem_groups
from condensegrpo.episodes.player import LocalPlayer
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import Limits, ToolLimits
from condensegrpo.episodes.toolcalls import Toolbox
from condensegrpo.episodes.toolformats import Native
from condensegrpo.episodes.workers.messages import Setup
from condensegrpo.episodes.workers.pool import WorkerPool
from condensegrpo.episodes.workers.processes import ProcessHost
from condensegrpo.episodes.workers.worker import OpenPlayer
from condensegrpo.learner.new_model import new_tokenizer

STREAM = (0, 1)  # run seed and step
CALLS = tuple(f'<tool_call>{{"name": "mix", "arguments": {{"word": "{word}"}}}}</tool_call>' for word in WORDS[:64])
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is played."""

    world: World
    loops: int  # of the tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a batch took."""

    wall: float  # seconds
    rank: float  # seconds of CPU of the rank
    busiest: float  # seconds of CPU of the busiest worker; of the rank without workers


@cache
def renderer() -> Renderer:
    """Of a tokenizer that knows the calls of the tool."""
    tokenizer = new_tokenizer([" ".join(WORDS), *CALLS], kind="bpe", vocab_size=len(WORDS) + 600)
    return Renderer(tokenizer, tools=toolbox(1).schemas)


def toolbox(loops: int) -> Toolbox:
    """The tool that computes."""
    return Toolbox({"mix": mixer(loops)}, format=Native(), limits=ToolLimits(seconds=60.0))


def mixer(loops: int):  # noqa: ANN201  a tool is any function
    """A tool that computes."""

    def mix(word: str) -> str:
        """Mix the letters of a word.

        Args:
            word: to mix.
        """
        number = 1
        for place in range(loops):
            number = (number * 31 + place + len(word)) % 1_000_003
        return f"w{number % 2000}"

    return mix


def process(trajectory: Trajectory, problem: Problem) -> Mapping[str, float]:
    """A reward that says where it was computed."""
    return {"process": float(os.getpid())}


def player(load: Load, sampler: Sampler) -> LocalPlayer:
    """Plays the world."""
    engine = Engine(
        sampler=sampler,
        renderer=renderer(),
        condenser=LastK(keep_last=2),
        condenser_name="last_k",
        toolbox=toolbox(load.loops),
        limits=Limits(max_turns=load.world.turns, max_context_tokens=2000, max_output_tokens=64),
    )
    return LocalPlayer(environment=partial(Readings, load.world), engine=engine, reward=process)


def open_worlds() -> OpenPlayer:
    """What opens players in a worker."""
    return player  # type: ignore[return-value]  # the settings of this benchmark are a Load


async def played(
    load: Load, batch: Sequence[ProblemGroup], sampler: Sampler, pool: WorkerPool, workers: int
) -> tuple[ScoredTrajectory, ...]:
    """Play the batch."""
    samples, (seed, step), unheard = load.world.samples, STREAM, lambda _: None
    if not workers:
        local = player(load, sampler)
        return await local.play(batch, samples=samples, run_seed=seed, step=step, on_scored=unheard)
    setup = Setup(0, load)
    scored, _ = await pool.play(
        setup, batch, workers=workers, samples=samples, stream=STREAM, turn_seconds=60.0, on_scored=unheard
    )
    return scored


def cpu_seconds(process: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measured(
    load: Load, batch: Sequence[ProblemGroup], sampler: Sampler, pool: WorkerPool, workers: int, known: set[int]
) -> Cost:
    """The cost of a batch; ``known`` are the processes of earlier ones."""
    before = {process: cpu_seconds(process) for process in known}
    wall, rank = time.monotonic(), time.process_time()
    scored = asyncio.run(played(load, batch, sampler, pool, workers))
    wall, rank = time.monotonic() - wall, time.process_time() - rank
    known |= {int(each.score.components["process"]) for each in scored}
    used = [cpu_seconds(process) - before.get(process, 0.0) for process in known if process != os.getpid()]
    return Cost(wall=wall, rank=rank, busiest=max(used, default=0.0) if workers else rank)


def benchmark(numbers: Sequence[int], load: Load, *, rounds: int) -> None:
    """Measure and print."""
    Instant.__module__ = "condensegrpo"  # as the package's own samplers, which need no task and thread of their own
    batch = problem_groups(load.world.problems(), STREAM[1])
    sampler = Instant([renderer().reply_ids(text) for text in CALLS])
    pool = WorkerPool(ProcessHost("rollout_workers:open_worlds"), sampler, model=lambda name: sampler)
    known, costs = set[int](), {number: list[Cost]() for number in numbers}
    for turn in range(rounds + 1):  # the first starts the workers
        for number in numbers:
            cost = measured(load, batch, sampler, pool, number, known)
            costs[number] += [cost] if turn else []
    pool.close()
    medians = {
        number: [statistics.median(getattr(cost, name) for cost in taken) for name in ("wall", "busiest", "rank")]
        for number, taken in costs.items()
    }
    one, requests, lines = medians.get(1, medians[numbers[0]]), load.world.trajectories * load.world.turns, []
    for number, (wall, busiest, rank) in medians.items():
        ratios = (f"{one[0] / wall:.2f}", f"{one[1] / busiest:.2f}")
        lines.append((str(number), f"{wall:.2f}", f"{busiest:.2f}", f"{1e6 * rank / requests:.0f}", *ratios))
    show("", ("workers", "wall s", "busiest CPU s", "rank µs/request", "wall ratio", "CPU ratio"), lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--loops", type=int, default=30_000, help="of the tool; 10,000 take about half a millisecond")
    arguments = parser.parse_args()
    import rollout_workers  # classes of __main__ have another name in the workers

    size = {"trajectories": arguments.trajectories, "turns": arguments.turns, "samples": SAMPLES}
    played_world = World(**size, reply=(1, 1), reading=ANSWER)  # replies are calls, as long as they are
    load = rollout_workers.Load(world=played_world, loops=arguments.loops)
    rollout_workers.benchmark(arguments.workers, load, rounds=arguments.rounds)
