"""What rollouts cost: the engine against bare vLLM and TRL's loop, barriers, growth with turns, and new weights.

    python benchmarks/rollout.py                        # all parts on a CPU, one thread
    python benchmarks/rollout.py --parts barrier turns  # those that need no vLLM
    python benchmarks/rollout.py --parts loops          # embedded sampler and vLLM against TRL's loop, if installed
    python benchmarks/rollout.py --quick                # toys: does it run
    python benchmarks/rollout.py --device cuda --dtype bfloat16

Sides that are compared run in processes of their own and take turns; a ratio is the median over rounds of the ratio
within a round. CPU seconds are those of all threads of a side: on a busy machine they tell more than the clock. Bare
``LLM.generate``, turn after turn, is also how TRL's trainers sample with vLLM in their own process. MFU is the
arithmetic that the turns need at least (flops.py) over time and the device's peak (devices.py).
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from devices import check_device, mfu, peak_of
from flops import sampling_flops
from rollout_sides import Reading, Setting, bare, syncs, through_engine, timed_side, weights_of
from rollout_world import NO_LIMIT, Size, World, chatter, engine, make_model, new_tokens, play, processed
from sides import Side
from tables import show
from trl_rollout import MISSING, missing, with_trl

from condensegrpo.assembly.plugins import build_plugin
from condensegrpo.condensers.full import Full
from condensegrpo.condensers.last_k import LastK
from condensegrpo.condensers.observation_mask import ObservationMask
from condensegrpo.core.protocols.condenser import Condenser
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.episodes.engine import Engine

KEEP = 2  # units that last_k and observation_mask show whole
WITH_VLLM, WITH_TRANSFORMERS = (partial(through_engine, name) for name in ("vllm", "transformers"))


class Bound(NamedTuple):
    """What is to be reached."""

    what: str
    at_most: float
    found: float


class Part(NamedTuple):
    """What a part of the benchmark has to say."""

    title: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    bounds: Sequence[Bound]


def overhead(options: argparse.Namespace, folder: Path) -> list[Part]:
    """The engine on vLLM against ``LLM.generate``, and against the engine on transformers."""
    size = Size(hidden=1024, layers=28, heads=16) if options.device == "cuda" else Size()
    size = Size(hidden=64, layers=2, heads=2) if options.quick else size
    make_model(folder, size)
    parts = []
    lengths = [(options.output, options.output), (options.output // 2, options.output * 3 // 2)]
    for reply in lengths[: 1 if options.quick else None]:
        world = World(trajectories=options.trajectories, turns=options.turns, reply=reply)
        longest = world.question + world.turns * (world.reply[1] + world.reading + 16)
        setting = Setting(folder=folder, world=world, dtype=options.dtype, threads=options.threads, longest=longest)
        parts.append(_overhead(options, setting, size))
    return parts


def _overhead(options: argparse.Namespace, setting: Setting, size: Size) -> Part:
    world = setting.world
    sides = {"engine on vLLM": timed_side(WITH_VLLM, setting), "bare LLM.generate": timed_side(bare, setting)}
    if options.transformers:
        sides["engine on transformers"] = timed_side(WITH_TRANSFORMERS, setting)
    recorded = sides["engine on vLLM"].run(True).found
    readings = _in_turns(sides, options.rounds, {"bare LLM.generate": recorded})
    base = readings["bare LLM.generate"]
    tokens = sum(length for wave in recorded for _, length in wave)
    flops = sampling_flops(size.model, recorded)
    peak = peak_of(options.device, dtype=options.dtype, tflops=options.peak_tflops)
    lines = [
        [
            name,
            f"{statistics.median(reading.wall for reading in taken):.2f}",
            f"{_ratio(taken, base, 'wall'):.3f}",
            f"{statistics.median(reading.cpu for reading in taken):.2f}",
            f"{_ratio(taken, base, 'cpu'):.3f}",
            f"{tokens / statistics.median(reading.wall for reading in taken):.0f}",
            mfu(flops, statistics.median(reading.wall for reading in taken), peak),
        ]
        for name, taken in readings.items()
    ]
    least, most = world.reply
    ours = readings["engine on vLLM"]
    return Part(
        f"{world.trajectories} trajectories of {world.turns} turns, replies of {least}–{most} tokens",
        ["side", "seconds", "× bare", "CPU seconds", "× bare, CPU", "sampled tokens/s", "MFU"],
        lines,
        [
            Bound("engine against bare vLLM, by the clock", 1.10, _ratio(ours, base, "wall")),
            Bound("engine against bare vLLM, CPU seconds", 1.10, _ratio(ours, base, "cpu")),
        ],
    )


def _in_turns(sides: Mapping[str, Side], rounds: int, given: Mapping[str, object]) -> dict[str, list[Reading]]:
    """The readings of sides that take turns, without those of a first round for warming up. Closes the sides."""
    readings: dict[str, list[Reading]] = {name: [] for name in sides}
    for turn in range(-1, rounds):
        for name, side in sides.items():
            reading = side.run(given.get(name))
            print(f"round {turn}: {name}: {reading.wall:.2f} s, {reading.cpu:.2f} CPU s", file=sys.stderr)
            if turn >= 0:
                readings[name].append(reading)
    for side in sides.values():
        side.close()
    return readings


def loops(options: argparse.Namespace, folder: Path) -> list[Part]:
    """The engine on transformers and on vLLM against TRL's loop: 4 × 8 trajectories, even and log-normal replies."""
    make_model(folder, Size(hidden=128, layers=2, heads=4))
    parts = []
    for spread in (0.0, 0.45):
        median = options.output // 8 if options.quick else options.output
        world = World(trajectories=32, samples=8, turns=options.turns, reply=(median, median), spread=spread)
        longest = world.question + world.turns * (max(map(max, world.lengths())) + world.reading + 16)
        parts.append(_loops(options, Setting(folder=folder, world=world, threads=options.threads, longest=longest)))
    return parts


def _loops(options: argparse.Namespace, setting: Setting) -> Part:
    sides = {"engine on transformers": timed_side(WITH_TRANSFORMERS, setting)}
    if find_spec("vllm"):
        sides["engine on vLLM"] = timed_side(WITH_VLLM, setting)
    if missing():
        print(MISSING)
    else:
        sides["TRL"] = timed_side(with_trl, setting)
    readings = _in_turns(sides, options.rounds, {})
    base, tokens = readings[list(sides)[-1]], sum(map(sum, setting.world.lengths()))
    if not missing() and {reading.found for reading in base} != {tokens}:
        raise RuntimeError(f"TRL sampled {base[0].found} tokens, wanted {tokens}")
    lines = [
        [
            name,
            f"{statistics.median(reading.wall for reading in taken):.2f}",
            f"{_ratio(base, taken, 'wall'):.2f}",
            f"{statistics.median(reading.cpu for reading in taken):.2f}",
            f"{_ratio(base, taken, 'cpu'):.2f}",
            f"{tokens / statistics.median(reading.wall for reading in taken):.0f}",
        ]
        for name, taken in readings.items()
    ]
    last, world = list(sides)[-1], setting.world
    return Part(
        f"{world.trajectories} trajectories of {world.turns} turns, replies of {world.reply[0]} tokens, "
        f"σ = {world.spread}",
        ["side", "seconds", f"times as fast as {last}", "CPU seconds", "the same, CPU", "sampled tokens/s"],
        lines,
        [
            Bound(f"seconds of {name} over those of {last}", at_most, _ratio(readings[name], base, "wall"))
            for name, at_most in (("engine on transformers", 1 / 2), ("engine on vLLM", 1 / 4))
            if name in sides
        ],
    )


def barrier(options: argparse.Namespace, folder: Path) -> list[Part]:
    """A batch with latencies of tools, free and in lock-step, against its longest trajectory."""
    make_model(folder, Size(hidden=32, layers=1, heads=1))
    latency = 0.02 if options.quick else options.latency
    sampling = latency / 5
    world = World(trajectories=options.trajectories, turns=options.turns, reply=(16, 16), latency=latency)
    sampler = chatter(2000, seconds=sampling)
    longest = max(map(sum, world.latencies())) + world.turns * sampling
    lock_step = sum(max(column) for column in zip(*world.latencies(), strict=True)) + world.turns * sampling
    walls: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(options.rounds):
        for held, seconds in walls.items():
            began = time.monotonic()
            play(engine(folder, sampler, world), world, barrier=held)
            seconds.append(time.monotonic() - began)
    medians = {held: statistics.median(seconds) for held, seconds in walls.items()}
    lines = [
        [name, f"{ideal:.2f}", f"{medians[held]:.2f}", f"{medians[held] / longest:.3f}"]
        for name, held, ideal in (("no barrier", False, longest), ("a barrier a turn", True, lock_step))
    ]
    return [
        Part(
            f"{world.trajectories} trajectories of {world.turns} turns, latencies of {world.latency} s (median)",
            ["schedule", "ideal seconds", "seconds", "× longest trajectory"],
            lines,
            [Bound("wall against the longest trajectory", 1.15, medians[False] / longest)],
        )
    ]


def turns(options: argparse.Namespace, folder: Path) -> list[Part]:
    """Tokens and time of a trajectory as turns grow, under three condensers and several budgets."""
    make_model(folder, Size(hidden=128, layers=4, heads=4))
    counts = (4, 8) if options.quick else (8, 16, 32, 64)
    variants: list[tuple[str, Condenser, int]] = [
        ("full", Full(), NO_LIMIT),
        (f"last_k(keep_last={KEEP})", LastK(keep_last=KEEP), NO_LIMIT),
        (f"observation_mask(keep={KEEP})", ObservationMask(keep=KEEP), NO_LIMIT),
        *((f"last_k, budget {budget}", LastK(keep_last=NO_LIMIT), budget) for budget in options.budgets),
        *((f"observation_mask, budget {budget}", ObservationMask(keep=KEEP), budget) for budget in options.budgets),
    ]
    sampler: Sampler = chatter(2000)
    if options.sampler != "scripted":
        sampler = build_plugin("samplers", options.sampler, {"model_path": str(folder), "dtype": options.dtype})
    weights = weights_of(folder)
    lines, bounds = [], []
    for name, condenser, budget in variants:
        figures = []
        for count in counts:
            sampler.update_weights(weights, 0)  # and with it every cached key and value goes
            world = World(trajectories=options.siblings, turns=count, reply=(16, 16))
            figures.append(_of_turns(engine(folder, sampler, world, condenser=condenser, budget=budget), world))
            print(f"{name}, K={count}: {3600 / figures[-1][2]:.1f} CPU s a trajectory", file=sys.stderr)
        exponents = [_exponent(counts, [row[place] for row in figures]) for place in (0, 1)]
        lines.append(
            [
                name,
                *(f"{row[0]:.0f}" for row in figures),
                f"{exponents[0]:.2f}",
                f"{exponents[1]:.2f}",
                *(f"{row[2]:.0f}" for row in figures),
            ]
        )
        if name == f"last_k(keep_last={KEEP})":
            bounds.append(Bound("exponent of the tokens processed under last_k", 1.1, exponents[0]))
    sampler.close()
    heads = ["condenser", *(f"K={count}" for count in counts), "exponent", "with prefix cache"]
    return [
        Part(
            f"tokens processed by a trajectory, and trajectories a CPU hour ({options.sampler})",
            [*heads, *(f"K={count}, traj./h" for count in counts)],
            lines,
            bounds,
        )
    ]


def _of_turns(parts: Engine, world: World) -> tuple[float, float, float]:
    """Tokens that a trajectory processes without and with keys and values kept, and trajectories a CPU hour."""
    began = time.process_time()
    trajectories = play(parts, world)
    seconds = time.process_time() - began
    return (
        statistics.fmean(map(processed, trajectories)),
        statistics.fmean(map(new_tokens, trajectories)),
        3600 * len(trajectories) / seconds,
    )


def sync(options: argparse.Namespace, folder: Path) -> list[Part]:
    """New weights for the samplers."""
    make_model(folder, Size(hidden=128, layers=4, heads=4))
    setting = Setting(
        folder=folder, world=World(trajectories=1, turns=1, reply=(1, 1)), dtype=options.dtype, threads=options.threads
    )
    lines, bounds = [], []
    for name in ("transformers", *(["vllm"] if find_spec("vllm") else [])):
        side = timed_side(partial(syncs, name), setting)
        side.run(0)
        readings = [side.run(version) for version in range(1, options.rounds + 3)]
        side.close()
        median = statistics.median(reading.wall for reading in readings)
        lines.append([name, f"{readings[0].found / 1e6:.2f} M", f"{1000 * median:.1f}"])
        bounds.append(Bound(f"seconds of a sync of {name}", 0.5, median))
    return [Part("new weights for a sampler", ["sampler", "parameters", "milliseconds"], lines, bounds)]


def _ratio(over: Sequence[Reading], under: Sequence[Reading], what: str) -> float:
    return statistics.median(getattr(a, what) / getattr(b, what) for a, b in zip(over, under, strict=True))


def _exponent(counts: Sequence[int], tokens: Sequence[float]) -> float:
    """The slope of log tokens over log turns, by least squares: 1 is linear, 2 is quadratic."""
    return statistics.linear_regression(list(map(math.log, counts)), list(map(math.log, tokens))).slope


PARTS: dict[str, Callable[[argparse.Namespace, Path], list[Part]]] = {
    "overhead": overhead,
    "loops": loops,
    "barrier": barrier,
    "turns": turns,
    "sync": sync,
}


def show_part(part: Part) -> None:
    """Print the tables of a part."""
    bounds = [
        [bound.what, f"≤ {bound.at_most:g}", f"{bound.found:.3f}", "yes" if bound.found <= bound.at_most else "no"]
        for bound in part.bounds
    ]
    show(part.title, part.heads, part.lines)
    show("", ["to reach", "wanted", "found", "met"], bounds)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6, help="of the parts overhead and barrier")
    parser.add_argument("--output", type=int, default=64, help="tokens of a reply, in overhead")
    parser.add_argument("--transformers", action="store_true", help="compare the engine on transformers, in overhead")
    parser.add_argument("--latency", type=float, default=2.0, help="seconds, median, of an answer, in barrier")
    parser.add_argument("--siblings", type=int, default=4, help="trajectories at once, in turns")
    parser.add_argument("--budgets", type=int, nargs="*", default=[256, 1024], help="tokens of a context, in turns")
    parser.add_argument(
        "--sampler", choices=["scripted", "transformers", "vllm"], default="transformers", help="in turns"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak-tflops", type=float, help="of the device, for MFU; default: see devices.py")
    parser.add_argument("--quick", action="store_true", help="toys")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the parts one after another; those that need vLLM are left out where there is none."""
    options = parse()
    check_device(options.device)
    torch.set_num_threads(options.threads)
    for name in options.parts:
        if name == "overhead" and find_spec("vllm") is None:
            print("overhead is left out: vLLM is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            for part in PARTS[name](options, Path(folder) / "policy"):
                show_part(part)


if __name__ == "__main__":
    main()
