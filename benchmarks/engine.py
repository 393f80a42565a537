"""What the trajectory engine itself costs: CPU time of one core per turn, with a sampler that answers at once.

    python benchmarks/engine.py                             # about ten minutes: all tables
    python benchmarks/engine.py --condensers last_k full    # some of them
    python benchmarks/engine.py --quick                     # one minute: short episodes, few trajectories
    python benchmarks/engine.py --memory observation_mask   # what is in memory when episodes of 256 turns end

Rendering, tokenising, counting, condensing, records and their writing are measured; the policy, tools and rewards are
not. A reply is 32 random tokens of a tokenizer of one token a word, answered by one user message of 8 words; with
tools, a call of a tool that answers at once. The budget is 2,000 tokens, that of ``full`` as long as the episode.

Every cell is a process of its own: CPU seconds and the growth of resident memory are its own. A cell that takes longer
than its limit is printed as "–", and so are longer ones. An exponent is the slope of log CPU of the whole step over
log turns (or log trajectories): 1 is flat per turn.
"""

import argparse
import gc
import math
import multiprocessing
import random
import resource
import signal
import statistics
import tempfile
import tracemalloc
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch
from meter import Meter
from rollout_world import WORDS, World, play
from tables import show

from condensegrpo.condensers.anchors import Anchors
from condensegrpo.condensers.attention import AttentionCondenser
from condensegrpo.condensers.observation_mask import ObservationMask
from condensegrpo.condensers.pipeline import Pipeline
from condensegrpo.condensers.summary import PolicySummary
from condensegrpo.condensers.whole_units import Full, LastK, RandomDrop, Truncate
from condensegrpo.core.condenser import Condenser, Stage
from condensegrpo.core.messages import History
from condensegrpo.core.protocols.sampler import NamedTensors
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams, Score, Trajectory
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.settings import Limits, ToolLimits
from condensegrpo.episodes.toolcalls import Toolbox
from condensegrpo.episodes.toolformats import Native
from condensegrpo.learner.new_model import new_tokenizer
from condensegrpo.storage.trajectories import write_trajectories

REPLY, ANSWER = 32, 8  # words
BUDGET = 2000  # tokens of a context
IDS, POINTER = array("I"), 8  # bytes of an output id or a log-probability in a tuple, the number itself excepted
SAMPLES = 8  # trajectories of a group
MASK_ONLY = ObservationMask(drop_oldest=False)
CONDENSERS: Mapping[str, Condenser] = {
    "full": Full(),
    "last_k": LastK(keep_last=2),
    "truncate": Truncate(),
    "observation_mask": ObservationMask(),
    "random_drop": RandomDrop(),
    "anchors": Anchors(),
    "attention": AttentionCondenser(scorer="instant"),
    "summary": PolicySummary(max_tokens=REPLY),
    "pipeline": Pipeline(
        [Stage(name="observation_mask", condenser=MASK_ONLY), Stage(name="last_k", condenser=LastK(keep_last=2))]
    ),
}
TURNS, TRAJECTORIES = (8, 32, 128, 512), (16, 64, 256, 1024, 4096)
FEW, SHORT = 16, 8  # trajectories where turns grow, turns where trajectories grow
LIMIT, QUICK_LIMIT = 30.0, 5.0  # seconds of CPU of a cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is played."""

    condenser: str
    turns: int
    trajectories: int
    tools: bool = False

    @property
    def world(self) -> World:
        """Its questions and answers."""
        return World(
            trajectories=self.trajectories, turns=self.turns, reply=(REPLY, REPLY), samples=SAMPLES, reading=ANSWER
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What it took."""

    seconds: float  # of CPU, user and system
    bytes: int  # by which resident memory grew at most

    def per_turn(self, cell: Cell) -> float:
        """Milliseconds."""
        return 1000 * self.seconds / (cell.turns * cell.trajectories)


class Instant:
    """Answers at once with random words; with tools, with a call."""

    version = 0

    def __init__(self, reply_ids: Sequence[tuple[int, ...]]) -> None:
        self._replies = reply_ids

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """The reply that the seed draws."""
        reply = self._replies[params.seed % len(self._replies)]
        return Generation(token_ids=reply, logprobs=(-0.5,) * len(reply), finish=FinishReason.STOP)

    def update(self, named_tensors: NamedTensors, version: int) -> None:
        """Has none."""

    def close(self) -> None:
        """Holds nothing."""


class InstantScorer:
    """Scores units by their place at once."""

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        """1, 2, 3, … of every history."""
        return [[float(place + 1) for place in range(len(history.units))] for history in histories]


def look(words: str) -> str:
    """Look at words.

    Args:
        words: to look at.
    """
    return words


def played(cell: Cell, file: Path, ended: Callable[[Trajectory], object] | None = None) -> None:
    """Play all trajectories of a cell and write them to a file; ``ended`` is called with each."""
    called = [f'<tool_call>{{"name": "look", "arguments": {{"words": "{word}"}}}}</tool_call>' for word in WORDS[:64]]
    kind: Literal["bpe", "words"] = "bpe" if cell.tools else "words"
    tokenizer = new_tokenizer([" ".join(WORDS), *called], kind=kind, vocab_size=len(WORDS) + 600)
    draw = random.Random(0)
    texts = called if cell.tools else [" ".join(draw.choices(WORDS, k=REPLY)) for _ in range(64)]
    toolbox = Toolbox({"look": look} if cell.tools else {}, format=Native(), limits=ToolLimits(seconds=10.0))
    renderer = Renderer(tokenizer, tools=toolbox.schemas)
    budget = 100 * cell.turns + BUDGET if cell.condenser == "full" else BUDGET
    engine = Engine(
        sampler=Instant([renderer.reply_ids(text) for text in texts]),
        renderer=renderer,
        condenser=CONDENSERS[cell.condenser],
        condenser_name=cell.condenser,
        scorers={"instant": InstantScorer()},
        toolbox=toolbox,
        limits=Limits(max_turns=cell.turns, max_context_tokens=budget, max_output_tokens=64),
    )

    def record(trajectory: Trajectory) -> None:
        if ended is not None:
            ended(trajectory)
        score = Score(total=0.0, components={}, format_valid=True, correct=0.0, context_tokens=0)
        finished.append(ScoredTrajectory.of(trajectory, score))

    finished: list[ScoredTrajectory] = []
    play(engine, cell.world, on_finish=record)
    write_trajectories(file, finished)


# --- a cell in a process of its own


def measured(cell: Cell, limit: float) -> Cost | None:
    """The cost of a cell; None: it took longer than ``limit`` seconds of CPU."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(cell, sender, limit))
    process.start()
    sender.close()
    try:
        cost: Cost | None = receiver.recv()
    except EOFError:
        cost = None
    process.join()
    if cost is None and process.exitcode != -signal.SIGXCPU:
        raise SystemExit(f"{cell} failed with code {process.exitcode}")
    return cost


def _child(cell: Cell, sender: "Connection[Cost, None]", limit: float) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        played(replace(cell, turns=2, trajectories=SAMPLES), Path(folder) / "first.parquet")  # what loads on first use
        gc.freeze()  # as a command does, once its libraries are loaded
        memory, before = Meter(), resource.getrusage(resource.RUSAGE_SELF)  # a meter begins with a collection
        used = int(before.ru_utime + before.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (used + int(limit) + 1, used + int(limit) + 5))
        played(cell, Path(folder) / "trajectories.parquet")
        after = resource.getrusage(resource.RUSAGE_SELF)
        seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        memory.ends("cell")
        sender.send(Cost(seconds=seconds, bytes=memory.peaks["cell"]))


# --- tables


def exponent(sizes: Sequence[int], costs: Sequence[Cost | None]) -> float | None:
    """Slope of log seconds over log size, by least squares, of the cells that ended; None: fewer than two."""
    points = [(math.log(size), math.log(cost.seconds)) for size, cost in zip(sizes, costs, strict=True) if cost]
    return statistics.linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else None


def table(title: str, rows: Mapping[str, Sequence[Cell]], sizes: Sequence[int], limit: float) -> None:
    """Milliseconds of CPU per turn of every cell, the exponent of a row, and the memory of its largest cell."""
    lines = []
    for name, cells in rows.items():
        costs: list[Cost | None] = []
        for cell in cells:  # what follows a cell over its limit would take longer still
            costs.append(measured(cell, limit) if not costs or costs[-1] else None)
        slope = exponent(sizes, costs)
        ended = [(cost, cell) for cost, cell in zip(costs, cells, strict=True) if cost]
        figures = [f"{cost.per_turn(cell):.2f}" if cost else "–" for cost, cell in zip(costs, cells, strict=True)]
        memory = f"{ended[-1][0].bytes / ended[-1][1].trajectories / 1000:.0f}" if ended else "–"
        lines.append((name, *figures, "–" if slope is None else f"{slope:.2f}", memory))
    show(title, ("condenser", *map(str, sizes), "exponent", "kB a trajectory"), lines)


def memory(cell: Cell) -> None:
    """What is allocated when the first trajectory ends and the others are about to, by file, and the tokens of it."""
    shares: list[tuple[str, float]] = []

    def ended(trajectory: Trajectory) -> None:
        if not shares:
            files = tracemalloc.take_snapshot().statistics("filename")
            rewritten = [turn for turn in trajectory.turns if turn.condensation is not None]
            ids = sum(len(turn.prompt_ids) for turn in rewritten) * IDS.itemsize
            sampled = sum(len(turn.output_ids) for turn in trajectory.turns) * 2 * POINTER
            shares.append(("all", sum(file.size for file in files) / cell.trajectories))
            shares.append(("of which ids of rewritten prompts", ids))
            shares.append(("of which output ids and log-probabilities", sampled))
            shares.extend((file.traceback[0].filename, file.size / cell.trajectories) for file in files[:12])

    with tempfile.TemporaryDirectory() as folder:
        played(replace(cell, turns=2), Path(folder) / "first.parquet")  # what loads on first use
        tracemalloc.start()
        played(cell, Path(folder) / "trajectories.parquet", ended)
        tracemalloc.stop()
    print(f"kB in memory a trajectory of {cell}")
    for name, size in shares:
        print(f"{size / 1000:8.0f}  {name}")


def main(names: Sequence[str], *, quick: bool) -> None:
    """Run all cells and print the tables."""
    turns, trajectories = (TURNS[:2], TRAJECTORIES[:2]) if quick else (TURNS, TRAJECTORIES)
    limit = QUICK_LIMIT if quick else LIMIT
    for tools in (False, True):
        ending = ", a tool call in every turn" if tools else ""
        grown = {name: [Cell(condenser=name, turns=k, trajectories=FEW, tools=tools) for k in turns] for name in names}
        title = f"ms of CPU per turn by turns, {FEW} trajectories{ending}"
        table(title, grown, turns, limit)
    many = {name: [Cell(condenser=name, turns=SHORT, trajectories=n) for n in trajectories] for name in names}
    table(f"ms of CPU per turn by trajectories, {SHORT} turns", many, trajectories, limit)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--condensers", nargs="+", choices=CONDENSERS, default=list(CONDENSERS))
    parser.add_argument("--quick", action="store_true", help="short episodes, few trajectories")
    parser.add_argument("--memory", choices=CONDENSERS, help="only what is in memory under this condenser")
    arguments = parser.parse_args()
    if arguments.memory:
        memory(Cell(condenser=arguments.memory, turns=256, trajectories=SAMPLES))
        raise SystemExit
    main(arguments.condensers, quick=arguments.quick)
