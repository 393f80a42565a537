"""How fast and how small the learner's step is, against the ways of the field and against its limit.

    python benchmarks/learner.py              # three workloads on a CPU, one thread, fp32
    python benchmarks/learner.py --quick      # a toy model: does it run, do gradients agree
    python benchmarks/learner.py --profile    # where the time of the learner's step goes
    python benchmarks/learner.py --device cuda --dtype bfloat16 --questions 16      # a model of 0.6 B parameters

The same model, rows and loss in every variant (passes.py says what each is, workloads.py what the rows are). Each runs
in a process of its own; they take turns. A ratio is the median over rounds of the ratio within a round.
Memory is the peak above the loaded model. MFU is the arithmetic that the gradient needs at least (flops.py), the same
in every variant, over time and the device's peak (devices.py). The exit code is 1 if a gradient is not that of the
first variant.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from devices import check_device, mfu, peak_of
from flops import useful_flops
from passes import (
    Budget,
    ModelSize,
    Prepare,
    by_length,
    compiled,
    limit,
    optimiser_step,
    output_only,
    shared,
    unshared,
    whole_batch,
    without_padding,
)
from sides import Side
from tables import Target, show, show_targets
from torch.profiler import ProfilerActivity
from worker import Clock, Job, Reading, prepared
from workloads import LENGTHS, QUICK_LENGTHS, Kind, Workload, workload

from condensegrpo.core.trajectory import Segment
from condensegrpo.learner.devices import DTYPES

OPERATORS = 16  # lines of a profile
# fp32 sums in another order; bf16 has 8 bits of mantissa
AGREEMENT = {"float32": 1e-5, "bfloat16": 5e-2}


class Variant(NamedTuple):
    """One line of a table."""

    name: str
    prepare: Prepare
    apart: bool = False  # a row for every turn, also where turns continue each other
    slow: bool = False  # runs in the first --slow-rounds rounds only
    compared: bool = True  # its gradient must be that of the first variant


WHOLE = Variant("padded whole batch, logits everywhere", whole_batch, slow=True)
SORTED = Variant("padded by length, logits everywhere", by_length, slow=True)
PACKED = Variant("packed, logits everywhere", without_padding, slow=True)
OUTPUT_ONLY = Variant("padded by length, output-only head", output_only)
APART = Variant("a row a turn, padded by length, output-only head", output_only, apart=True)
UNSHARED = Variant("learner's pass, nothing shared", unshared)
TREE_OF_TURNS = Variant("learner's pass, a row a turn, prefixes shared", shared, apart=True)
SHARED = Variant("learner's pass, prefixes shared", shared)
COMPILED = Variant("learner's pass, prefixes shared, layers compiled", compiled)
STEP = Variant("learner's step (DeepSpeed, AdamW)", optimiser_step)
LIMIT = Variant("limit: the bare model", limit, compared=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One table."""

    kind: Kind
    vocabulary: int
    variants: tuple[Variant, ...]
    bounds: tuple["Bound", ...]


class Bound(NamedTuple):
    """What is to be reached: a figure of one variant over that of another."""

    name: str
    over: Variant
    under: Variant
    at_least: bool  # or at most
    goal: float
    memory: bool = False  # of peak memory, not of time

    def target(self, measured: "Mapping[Variant, Measured]") -> Target:
        """The bound with what was measured."""
        over, under = measured[self.over], measured[self.under]
        figure = over.peak / under.peak if self.memory else ratio(over, under)
        return Target(self.name, figure, self.goal, self.at_least)


BENCHES = {
    "condensed-32k": Bench(
        kind=Kind.CONDENSED,
        vocabulary=32768,
        variants=(WHOLE, SORTED, PACKED, OUTPUT_ONLY, UNSHARED, SHARED, STEP, LIMIT),
        bounds=(
            Bound("speed against the padded whole batch", WHOLE, SHARED, True, 10.0),
            Bound("memory against the padded whole batch", SHARED, WHOLE, False, 0.2, memory=True),
            Bound("speed against padding by length with an output-only head", OUTPUT_ONLY, SHARED, True, 1.8),
            Bound("time of the step against its limit", STEP, LIMIT, False, 1.15),
        ),
    ),
    "condensed-152k": Bench(
        kind=Kind.CONDENSED,
        vocabulary=151936,
        variants=(OUTPUT_ONLY, SHARED),
        bounds=(Bound("speed against padding by length with an output-only head", OUTPUT_ONLY, SHARED, True, 1.5),),
    ),
    "append-32k": Bench(
        kind=Kind.APPEND,
        vocabulary=32768,
        variants=(OUTPUT_ONLY, APART, UNSHARED, TREE_OF_TURNS, SHARED, STEP, LIMIT),
        bounds=(
            Bound("speed against a padded row a trajectory with an output-only head", OUTPUT_ONLY, SHARED, True, 2.0),
            Bound("time of the step against its limit", STEP, LIMIT, False, 1.15),
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one variant took, round by round."""

    readings: tuple[Reading, ...]
    off: float | None  # largest difference to the first variant's gradient over its largest entry; or of the norms

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of every round that it ran in."""
        return tuple(reading.seconds for reading in self.readings)

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def peak(self) -> int:
        """Bytes."""
        return max(reading.peak for reading in self.readings)


def measure(
    bench: Bench, load: Workload, size: ModelSize, budget: Budget, options: argparse.Namespace
) -> list[Measured]:
    """Run the variants in turns."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.pt" for number in range(len(bench.variants))]
        jobs = [
            Job(
                prepare=variant.prepare,
                rows=load.apart if variant.apart else load.rows,
                size=size,
                budget=budget,
                threads=options.threads,
                clock=options.clock,
                seed=options.seed,
                gradient=path,
            )
            for variant, path in zip(bench.variants, paths, strict=True)
        ]
        workers = [Side(partial(prepared, job), "fork" if budget.device == "cpu" else "spawn") for job in jobs]
        readings: list[list[Reading]] = [[] for _ in workers]
        for turn in range(options.rounds):
            for variant, worker, timed in zip(bench.variants, workers, readings, strict=True):
                if not variant.slow or turn < options.slow_rounds:
                    timed.append(worker.run())
                    print(f"round {turn}: {variant.name}: {timed[-1].seconds:.2f} s", file=sys.stderr)
        for worker in workers:
            worker.close()
        first = torch.load(paths[0])
        return [
            Measured(readings=tuple(timed), off=difference(first, path, timed[0].norm) if variant.compared else None)
            for variant, path, timed in zip(bench.variants, paths, readings, strict=True)
        ]


def difference(expected: Sequence[torch.Tensor], path: Path, norm: float | None) -> float:
    """How far a gradient is from the expected one: by its largest entry, or by its norm where only that is known."""
    if norm is not None:
        expected_norm = float(torch.nn.utils.get_total_norm(expected))  # rounded as the learner's
        return abs(norm - expected_norm) / expected_norm
    largest = max(float(grad.abs().max()) for grad in expected)
    differences = [(entries - grad).abs().max() for entries, grad in zip(torch.load(path), expected, strict=True)]
    return float(torch.stack(differences).max()) / largest  # a NaN stays one


def ratio(over: Measured, under: Measured) -> float:
    """The median over rounds of the ratio of seconds within a round."""
    return statistics.median(a / b for a, b in zip(over.seconds, under.seconds, strict=False))


def disagreeing(measured: Mapping[Variant, Measured], tolerance: float) -> list[str]:
    """The variants whose gradient is another one, NaN included."""
    return [
        variant.name
        for variant, measurement in measured.items()
        if measurement.off is not None and not measurement.off <= tolerance
    ]


def table(
    measured: Mapping[Variant, Measured], *, trained: int, flops: float, peak: float | None
) -> tuple[list[str], list[list[str]]]:
    """Heads and lines.

    Args:
        flops: that the gradient needs at least.
        peak: FLOP/s of the device; None: not known.
    """
    base = next(iter(measured.values()))
    heads = ["variant", "seconds: median (min–max)", "× as fast", "peak memory", "trained tokens/s"]
    heads += ["useful GFLOP/s", "MFU", "gradient off by"]
    lines = [
        [
            variant.name,
            f"{measurement.median:.2f} ({min(measurement.seconds):.2f}–{max(measurement.seconds):.2f})",
            f"{ratio(base, measurement):.2f}",
            f"{measurement.peak / 2**20:.0f} MiB",
            f"{trained / measurement.median:.0f}",
            f"{flops / measurement.median / 1e9:.1f}",
            mfu(flops, measurement.median, peak),
            "–" if measurement.off is None else f"{measurement.off:.0e}",
        ]
        for variant, measurement in measured.items()
    ]
    return heads, lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; on a CPU with one thread the clock is CPU time, which other processes do not move."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(BENCHES), default=list(BENCHES))
    parser.add_argument("--questions", type=int, default=1, help="P; each has 8 trajectories of 6 turns")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slow-rounds", type=int, default=1, help="of the variants with logits everywhere")
    parser.add_argument("--tokens-per-micro-batch", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["cpu", "wall"], help="default: cpu on a CPU with one thread, else wall")
    parser.add_argument("--model", choices=list(MODELS), help="default: small on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for MFU; default: see devices.py")
    parser.add_argument("--compile", action="store_true", help="the learner's pass with compiled layers too")
    parser.add_argument("--quick", action="store_true", help="a toy model and short rows")
    parser.add_argument("--profile", action="store_true", help="the learner's step by operators, and no table")
    options = parser.parse_args(arguments)
    clock: Clock = "cpu" if options.device == "cpu" and options.threads == 1 else "wall"
    options.clock = options.clock or clock
    options.model = options.model or ("small" if options.device == "cpu" else "qwen3-0.6b")
    return options


MODELS = {  # layers and sizes; the vocabulary is the workload's
    "small": ModelSize(layers=6, hidden=256, heads=4, kv_heads=2, head=64, ffn=768, vocabulary=0),
    "qwen3-0.6b": ModelSize(layers=28, hidden=1024, heads=16, kv_heads=8, head=128, ffn=3072, vocabulary=0),
    "qwen3-1.7b": ModelSize(layers=28, hidden=2048, heads=16, kv_heads=8, head=128, ffn=6144, vocabulary=0),
    "qwen3-4b": ModelSize(layers=36, hidden=2560, heads=32, kv_heads=8, head=128, ffn=9728, vocabulary=0),
}


def model_size(model: str, vocabulary: int, *, quick: bool) -> ModelSize:
    """One of ``MODELS``, or a toy."""
    if quick:
        return ModelSize(layers=2, hidden=32, heads=2, kv_heads=1, head=16, ffn=64, vocabulary=512)
    return replace(MODELS[model], vocabulary=vocabulary)


def print_profile(size: ModelSize, budget: Budget, rows: Sequence[Segment], *, seed: int) -> None:
    """The operators of one optimiser step after another one, by the shapes of their inputs, the slowest first."""
    on_gpu = budget.device != "cpu"
    model = size.build(seed=seed, dtype=DTYPES[budget.dtype])
    model.to(device=budget.device)
    step = optimiser_step(model, budget, rows)
    step(rows)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step(rows)
    slowest = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    averages = profiler.key_averages(group_by_input_shape=True)
    print(averages.table(sort_by=slowest, row_limit=OPERATORS, max_shapes_column_width=60))


def run(name: str, options: argparse.Namespace) -> list[str]:
    """One workload: its tables, or its profile. The variants whose gradient is wrong."""
    bench = BENCHES[name]
    if options.compile:
        bench = replace(bench, variants=(*bench.variants, COMPILED))
    lengths = (QUICK_LENGTHS if options.quick else LENGTHS)[bench.kind]
    size = model_size(options.model, bench.vocabulary, quick=options.quick)
    budget = Budget(tokens=options.tokens_per_micro_batch, dtype=options.dtype, device=options.device)
    load = workload(bench.kind, lengths, questions=options.questions, vocabulary=size.vocabulary, seed=options.seed)
    print(
        f"\n**{name}**: {options.questions} × 8 trajectories of 6 turns, {len(load.rows)} rows of "
        f"{load.tokens} tokens ({load.distinct} different), {load.trained} trained; {size.layers} layers of "
        f"{size.hidden}, vocabulary {size.vocabulary}; {options.dtype} on {options.device}, {options.threads} "
        f"thread(s), {options.clock} time, seed {options.seed}\n",
        flush=True,
    )
    if options.profile:
        print_profile(size, budget, load.rows, seed=options.seed)
        return []
    measured = dict(zip(bench.variants, measure(bench, load, size, budget, options), strict=True))
    flops = useful_flops(size, load.rows)
    peak = peak_of(options.device, dtype=options.dtype, tflops=options.peak_tflops)
    show(name, *table(measured, trained=load.trained, flops=flops, peak=peak))
    if not options.quick:  # a toy says nothing about them
        show_targets(bound.target(measured) for bound in bench.bounds)
    against = "of an unknown peak: --peak-tflops" if peak is None else f"of {peak / 1e12:.2f} TFLOP/s"
    print(f"{flops / 1e9:.1f} GFLOPs of useful arithmetic; MFU is {against}")
    return disagreeing(measured, AGREEMENT[options.dtype])


def main() -> None:
    """Run the workloads one after another."""
    options = parse()
    check_device(options.device)
    torch.set_num_threads(options.threads)  # before anything is forked
    wrong = {name: run(name, options) for name in options.workloads}
    if options.profile:
        return
    for name, variants in wrong.items():
        for variant in variants:
            print(f"{name}: the gradient of {variant!r} is not that of the first variant")
    if any(wrong.values()):
        sys.exit(1)
    print(f"\nAll gradients agree within {AGREEMENT[options.dtype]:g} of the largest entry (the step's: of the norm).")


if __name__ == "__main__":
    main()
