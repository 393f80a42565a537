"""Runs a shipped configuration with several seeds and prints the table that the README shows.

    python benchmarks/seeds.py --config configs/quickstart.yaml --seeds 0 1 2 3 4

Every run is an ordinary `condensegrpo train` in a process of its own; the figures are read from its metrics.jsonl. Runs
that are in --runs-dir already are read and not repeated.
"""

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from condensegrpo.config.load import find_config, load_config
from condensegrpo.storage.trackers import read_metrics

# the bar that the quickstart sets itself: after training, at least 4 of 5 seeds
WANTED = {"eval": 0.95, "eval/K=20": 0.93, "eval/K=50": 0.88}
BEFORE, SHORTER = 0.35, 0.20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run."""

    seed: int
    evaluated: list[dict[str, float]]  # the metrics of its evaluations, in order
    seconds: float | None  # of the whole process; None: it was there already

    @property
    def before(self) -> dict[str, float]:
        """The first evaluation."""
        return self.evaluated[0]

    @property
    def after(self) -> dict[str, float]:
        """The last evaluation."""
        return self.evaluated[-1]

    @property
    def shorter(self) -> float:
        """By what share the mean largest context shrank."""
        return 1 - self.after["eval/context_tokens"] / self.before["eval/context_tokens"]

    @property
    def passed(self) -> bool:
        """Whether the run meets every bar of what it evaluated."""
        bars = {f"{place}/success": bar for place, bar in WANTED.items()}
        reached = all(self.after[key] >= bar for key, bar in bars.items() if key in self.after)
        return self.before["eval/success"] <= BEFORE and self.shorter >= SHORTER and reached


def run(config: Path, seed: int, runs_dir: Path, overrides: list[str]) -> Row:
    """Train once, unless the run is there; the output goes to the run's own log."""
    name = f"{config.stem}-seed{seed}"
    command = [sys.executable, "-m", "condensegrpo.cli", "train", str(config), f"seed={seed}", f"name={name}"]
    seconds = None
    if not (runs_dir / name).is_dir():
        began = time.monotonic()
        subprocess.run([*command, f"runs_dir={runs_dir}", *overrides], check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - began
    evaluated = [line for line in read_metrics(runs_dir / name / "metrics.jsonl") if "eval/success" in line]
    return Row(seed=seed, evaluated=evaluated, seconds=seconds)


def line(cells: list[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def table(rows: list[Row]) -> str:
    """The runs as a Markdown table, the medians last."""
    places = [place for place in WANTED if f"{place}/success" in rows[0].after]
    heads = [
        "seed",
        "success before",
        *(f"{_name(place)} after" for place in places),
        "context before → after",
        "shorter",
        "seconds",
    ]
    lines = [line(heads), line(["---"] * len(heads))]
    for row in rows:
        cells = [f"{row.before['eval/success']:.3f}", *(f"{row.after[f'{place}/success']:.3f}" for place in places)]
        context = f"{row.before['eval/context_tokens']:.1f} → {row.after['eval/context_tokens']:.1f}"
        lines.append(line([str(row.seed), *cells, context, f"{row.shorter:.0%}", _seconds([row])]))
    median = [statistics.median(row.before["eval/success"] for row in rows)]
    median += [statistics.median(row.after[f"{place}/success"] for row in rows) for place in places]
    context = " → ".join(
        f"{statistics.median(part):.1f}"
        for part in ([r.before["eval/context_tokens"] for r in rows], [r.after["eval/context_tokens"] for r in rows])
    )
    shorter = f"{statistics.median(row.shorter for row in rows):.0%}"
    lines.append(line(["median", *(f"{value:.3f}" for value in median), context, shorter, _seconds(rows)]))
    return "\n".join(lines)


def course(rows: list[Row]) -> str:
    """Success and context of every evaluation on the way, seed by seed, as a Markdown table."""
    heads = ["steps", *(f"seed {row.seed}: success, context" for row in rows)]
    lines = [line(heads), line(["---"] * len(heads))]
    for evaluations in zip(*(row.evaluated for row in rows), strict=True):
        cells = [f"{metrics['eval/success']:.3f}, {metrics['eval/context_tokens']:.1f}" for metrics in evaluations]
        lines.append(line([f"{evaluations[0]['step']:.0f}", *cells]))
    return "\n".join(lines)


def _seconds(rows: list[Row]) -> str:
    known = [row.seconds for row in rows if row.seconds is not None]
    return f"{statistics.median(known):.0f}" if known else "–"


def _name(place: str) -> str:
    return "success" if place == "eval" else place.removeprefix("eval/")


def main() -> None:
    """Run the seeds one after another, print the table and how many runs meet the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs-dir", type=Path, default=Path("runs") / f"seeds-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--set", nargs="*", default=[], help="key=value, as for condensegrpo train")
    arguments = parser.parse_args()
    path = find_config(arguments.config)
    load_config(path, arguments.set)
    rows: list[Row] = []
    for seed in arguments.seeds:
        rows.append(run(path, seed, arguments.runs_dir, arguments.set))
        print(
            f"seed {seed}: {_seconds(rows[-1:])} s, {'meets' if rows[-1].passed else 'misses'} the bar",
            file=sys.stderr,
        )
    print(f"{table(rows)}\n\n{course(rows)}")
    print(f"\n{sum(row.passed for row in rows)} of {len(rows)} runs meet the bar of the quickstart")


if __name__ == "__main__":
    main()
