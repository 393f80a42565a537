"""What rollouts cost: the engine against bare vLLM and TRL's loop, barriers, growth with turns, and new weights.

    python benchmarks/rollout.py                        # all parts on a CPU, one thread
    python benchmarks/rollout.py --parts barrier turns  # those that need no vLLM; turns takes half a minute
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
from rollout_sides import Reading, Setting, bare, syncs, through_engine, timed_side
from rollout_world import NO_LIMIT, Size, World, chatter, engine, make_model, new_tokens, play, processed
from sides import Side
from tables import Target, show, show_targets
from trl_rollout import MISSING, missing, with_trl

from condensegrpo.condensers.observation_mask import ObservationMask
from condensegrpo.condensers.whole_units import Full, LastK
from condensegrpo.core.condenser import Condenser

KEEP = 2  # units that last_k and observation_mask show whole
WITH_VLLM, WITH_TRANSFORMERS = (partial(through_engine, name) for name in ("vllm", "transformers"))


class Part(NamedTuple):
    """What a part of the benchmark has to say."""

    title: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    targets: Sequence[Target]


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
    ours, base = readings["engine on vLLM"], readings["bare LLM.generate"]
    tokens = sum(length for wave in recorded for _, length in wave)
    flops, least, most = sampling_flops(size.model, recorded), *world.reply
    peak = peak_of(options.device, dtype=options.dtype, tflops=options.peak_tflops)
    heads, lines = _compared(readings, "bare LLM.generate", tokens)
    return Part(
        f"{world.trajectories} trajectories of {world.turns} turns, replies of {least}–{most} tokens",
        [*heads, "MFU"],
        [[*line, mfu(flops, _median(taken), peak)] for line, taken in zip(lines, readings.values(), strict=True)],
        [
            Target("engine against bare vLLM, by the clock", _ratio(ours, base, "wall"), 1.10),
            Target("engine against bare vLLM, CPU seconds", _ratio(ours, base, "cpu"), 1.10),
        ],
    )


def _compared(readings: Mapping[str, list[Reading]], base: str, tokens: int) -> tuple[list[str], list[list[str]]]:
    """Heads and a line for each side: its seconds, and those of ``base`` over them."""
    heads = ["side", "seconds", f"{base}'s over these", "CPU seconds", "the same, CPU", "sampled tokens/s"]
    lines = [
        [
            name,
            f"{_median(taken):.2f}",
            f"{_ratio(readings[base], taken, 'wall'):.3f}",
            f"{statistics.median(reading.cpu for reading in taken):.2f}",
            f"{_ratio(readings[base], taken, 'cpu'):.3f}",
            f"{tokens / _median(taken):.0f}",
        ]
        for name, taken in readings.items()
    ]
    return heads, lines


def _median(taken: Sequence[Reading]) -> float:
    return statistics.median(reading.wall for reading in taken)


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
    last, world = list(sides)[-1], setting.world
    base, tokens = readings[last], sum(map(sum, world.lengths()))
    if not missing() and {reading.found for reading in base} != {tokens}:
        raise RuntimeError(f"TRL sampled {base[0].found} tokens, wanted {tokens}")
    return Part(
        f"{world.trajectories} trajectories of {world.turns} turns, replies of {world.reply[0]} tokens, "
        f"σ = {world.spread}",
        *_compared(readings, last, tokens),
        [
            Target(f"seconds of {name} over those of {last}", _ratio(readings[name], base, "wall"), bound)
            for name, bound in (("engine on transformers", 1 / 2), ("engine on vLLM", 1 / 4))
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
    paces = [world.pace(problem.id) for problem in world.problems()]
    longest = max(map(sum, paces)) + world.turns * sampling
    lock_step = sum(map(max, zip(*paces, strict=True))) + world.turns * sampling
    walls: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(options.rounds):
        for in_step, seconds in walls.items():
            began = time.monotonic()
            play(engine(folder, sampler, world), world, barrier=in_step)
            seconds.append(time.monotonic() - began)
    free, in_step = map(statistics.median, walls.values())
    lines = [
        [name, f"{ideal:.2f}", f"{seconds:.2f}", f"{seconds / longest:.3f}"]
        for name, ideal, seconds in (("no barrier", longest, free), ("a barrier a turn", lock_step, in_step))
    ]
    return [
        Part(
            f"{world.trajectories} trajectories of {world.turns} turns, latencies of {world.latency} s (median)",
            ["schedule", "ideal seconds", "seconds", "× longest trajectory"],
            lines,
            [Target("wall against the longest trajectory", free / longest, 1.15)],
        )
    ]


def turns(options: argparse.Namespace, folder: Path) -> list[Part]:
    """Tokens of a trajectory as turns grow, under three condensers and several budgets."""
    make_model(folder, Size(hidden=32, layers=1, heads=1))
    counts = (4, 8) if options.quick else (8, 16, 32, 64)
    last_k = f"last_k(keep_last={KEEP})"
    variants: list[tuple[str, Condenser, int]] = [
        ("full", Full(), NO_LIMIT),
        (last_k, LastK(keep_last=KEEP), NO_LIMIT),
        (f"observation_mask(keep={KEEP})", ObservationMask(keep=KEEP), NO_LIMIT),
        *((f"last_k, budget {budget}", LastK(keep_last=NO_LIMIT), budget) for budget in options.budgets),
        *((f"observation_mask, budget {budget}", ObservationMask(keep=KEEP), budget) for budget in options.budgets),
    ]
    lines, targets = [], []
    for name, condenser, budget in variants:
        played = []
        for count in counts:
            world = World(trajectories=1, turns=count, reply=(16, 16))
            played += play(engine(folder, chatter(2000), world, condenser=condenser, budget=budget), world)
        tokens, uncached = [processed(each) for each in played], [new_tokens(each) for each in played]
        exponent = _exponent(counts, tokens)
        lines.append([name, *map(str, tokens), f"{exponent:.2f}", f"{_exponent(counts, uncached):.2f}"])
        if name == last_k:
            targets.append(Target("exponent of the tokens processed under last_k", exponent, 1.1))
    heads = ["condenser", *(f"K={count}" for count in counts), "exponent", "with prefix cache"]
    return [Part("tokens processed by a trajectory of K turns", heads, lines, targets)]


def sync(options: argparse.Namespace, folder: Path) -> list[Part]:
    """New weights for the samplers."""
    make_model(folder, Size(hidden=128, layers=4, heads=4))
    setting = Setting(
        folder=folder, world=World(trajectories=1, turns=1, reply=(1, 1)), dtype=options.dtype, threads=options.threads
    )
    lines, targets = [], []
    for name in ("transformers", *(["vllm"] if find_spec("vllm") else [])):
        side = timed_side(partial(syncs, name), setting)
        side.run(0)
        readings = [side.run(version) for version in range(1, options.rounds + 3)]
        side.close()
        lines.append([name, f"{readings[0].found / 1e6:.2f} M", f"{1000 * _median(readings):.1f}"])
        targets.append(Target(f"seconds of a sync of {name}", _median(readings), 0.5))
    return [Part("new weights for a sampler", ["sampler", "parameters", "milliseconds"], lines, targets)]


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
    parser.add_argument("--budgets", type=int, nargs="*", default=[256, 1024], help="tokens of a context, in turns")
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
                show(part.title, part.heads, part.lines)
                show_targets(part.targets)


if __name__ == "__main__":
    main()
