"""Runs the benchmarks in a short form, one after another, and writes the page docs/results/benchmarks.md.

    python benchmarks/all.py                            # or make benchmarks; about 15 minutes of a quiet core
    python benchmarks/all.py --only sandbox engine      # these; the others stay on the page as they were measured
    python benchmarks/all.py --again                    # also those that are already measured

What a benchmark printed is kept in ``.bench``, with command, date, seconds, load and machine. A second call continues
after the last one that ended, and measures again where command, machine or versions differ.
``benchmarks/tools.py`` and ``mbpp.py`` need data, ``attention.py oracle`` a trained policy: they are not part of it.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
INTRODUCTION = """# Benchmarks

Short forms of the benchmarks, as they were printed. `make benchmarks` measures them and writes this page; the linked
pages have the long forms, comparisons and what follows from them. The load is that of the machine in the minute before:
where it is above 0 other processes ran, and wall-clock seconds say little.
"""
PACKAGES = ("condensegrpo", "torch", "transformers", "deepspeed")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One section of the page."""

    name: str  # a file of this folder
    page: str  # of docs/results, which has the long form and what follows from it
    question: str
    options: str = ""  # of the short form, as in a shell


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one benchmark printed, and when and where."""

    command: str
    output: str  # Markdown
    began: str  # UTC
    seconds: float  # wall clock
    load: float  # mean of the processes that waited for a CPU in the minute before it began
    machine: str
    versions: str


BENCHMARKS = (
    Benchmark("sandbox", "sandbox-and-tools.md", "What does a sandboxed call cost?"),
    Benchmark(
        "adapter_rounding", "samplers.md", "How much of an update by adapters reaches the sampler in bfloat16?"
    ),
    Benchmark(
        "attention", "attention.md", "What does reading attention add to a pass?",
        "cost --lengths 512 1024 2048 --repeats 3",
    ),
    Benchmark("condensing", "rollouts.md", "What does a condenser cost that needs a model?", "--problems 4"),
    Benchmark("engine", "engine.md", "What does a turn cost beside the model?", "--quick"),
    Benchmark(
        "rollout", "rollouts.md", "How do the tokens that a trajectory processes grow with its turns?",
        "--parts turns --sampler scripted",
    ),
    Benchmark("rollout_workers", "rollouts.md", "What do worker processes gain where tools compute?", "--rounds 2"),
    Benchmark(
        "plan", "memory-prediction.md", "How far is `condensegrpo plan` from the measured peak of memory?",
        "--only 'ZeRO 0' 'bfloat16, ZeRO 1' 'LoRA, KL'",
    ),
    Benchmark(
        "inspector", "inspector.md", "How fast does `condensegrpo inspect` open a large run?",
        "--trajectories 5000 --out .bench/inspector",
    ),
    Benchmark(
        "learner", "learner.md", "How fast is an optimiser step, against other ways and its own limit?",
        "--workloads append-32k --rounds 1",
    ),
)  # fmt: skip


def machine() -> str:
    """Processor, cores and memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = psutil.virtual_memory().total / 2**30
    return f"{(models or [platform.processor()])[0]}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"


def versions() -> str:
    """Those of Python and of the packages that figures depend on."""
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)])


def result_of(benchmark: Benchmark, folder: Path) -> Result | None:
    """What was measured before; None: nothing."""
    file = folder / f"{benchmark.name}.json"
    return Result(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def command_of(benchmark: Benchmark) -> list[str]:
    """As it is typed in the repository."""
    return ["python", f"benchmarks/{benchmark.name}.py", *shlex.split(benchmark.options)]


def measure(benchmark: Benchmark, folder: Path) -> Result:
    """Run one benchmark in a process with one thread and keep what it printed; SystemExit if it fails."""
    began, load, start = datetime.now(UTC), os.getloadavg()[0], time.monotonic()
    command = command_of(benchmark)
    done = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result = Result(
        command=shlex.join(command),
        output=done.stdout.strip(),
        began=f"{began:%Y-%m-%d %H:%M}",
        seconds=round(time.monotonic() - start, 1),
        load=round(load, 1),
        machine=machine(),
        versions=versions(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(result), ensure_ascii=False, indent=1)
    (folder / f"{benchmark.name}.json").write_text(text + "\n", encoding="utf-8")
    return result


def page(results: Sequence[tuple[Benchmark, Result]], missing: Sequence[str] = ()) -> str:
    """The page: where and when each was measured, what it printed, and the names of those that are not measured."""
    places = sorted({(result.machine, result.versions) for _, result in results})
    lines = [
        INTRODUCTION,
        *(f"* {machine}; {versions}" for machine, versions in places),
        *([f"* not measured yet: {', '.join(missing)}"] if missing else []),
    ]
    for benchmark, result in results:
        place = "" if len(places) == 1 else f" {result.machine}; {result.versions}."
        lines += [
            *("", f"## {benchmark.question}", ""),
            *("```bash", result.command, "```", ""),
            f"{result.began} UTC, {result.seconds:.0f} s, load {result.load:.1f} before.{place} "
            f"Long form: [{benchmark.page}]({benchmark.page})",
            *("", result.output),
        ]
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[benchmark.name for benchmark in BENCHMARKS])
    parser.add_argument("--again", action="store_true", help="measure again what is measured already")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench", help="folder of what was measured")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "benchmarks.md")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, benchmarks: Sequence[Benchmark] = BENCHMARKS) -> None:
    """Measure what is not measured yet, with progress, and write the page after each."""
    options = parse(arguments)
    chosen = [benchmark for benchmark in benchmarks if not options.only or benchmark.name in options.only]
    for number, benchmark in enumerate(chosen, start=1):
        known = result_of(benchmark, options.out)
        current = shlex.join(command_of(benchmark)), machine(), versions()
        if known and not options.again and (known.command, known.machine, known.versions) == current:
            print(f"{number}/{len(chosen)} {benchmark.name}: measured on {known.began}")
            continue
        print(f"{number}/{len(chosen)} {benchmark.name} …", flush=True)
        result = measure(benchmark, options.out)
        print(f"{number}/{len(chosen)} {benchmark.name}: {result.seconds:.0f} s")
    found = [(benchmark, result) for benchmark in benchmarks if (result := result_of(benchmark, options.out))]
    missing = [benchmark.name for benchmark in benchmarks if not (options.out / f"{benchmark.name}.json").exists()]
    options.page.write_text(page(found, missing), encoding="utf-8")
    print(f"{options.page}: {len(found)} of {len(benchmarks)} benchmarks")


if __name__ == "__main__":
    main()
