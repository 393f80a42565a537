"""Writes the tables and the picture of the studies of methods from the committed results:

    python docs/scripts/methods.py docs/results/methods.md

A table stands between ``<!-- methods NAME -->`` and ``<!-- end of methods -->``; a test compares page and files. Every
run of a seed starts from the same policy (``studies/methods.py``), so that differences are paired by seed.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from condensegrpo.reporting.plots import arm_style, bars, canvas
from condensegrpo.studies.lab.intervals import Matrix, difference_interval, mean_interval
from condensegrpo.studies.lab.predictions import Figure, outcome
from condensegrpo.studies.lab.results import claims_table
from condensegrpo.studies.lab.study import load_lab_study

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results/methods"
PICTURE = ROOT / "docs/images/methods.svg"
TABLE = re.compile(r"(<!-- methods (\w+) -->\n).*?(<!-- end of methods -->)", re.DOTALL)
Json = Mapping[str, Any]
HEADS = ("arm", "success, mean [95 %]", "minus `full` [95 %], paired", "largest context", "with a prefix cache")


def main() -> None:
    """Rewrite the page and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    draw()


def filled(page: str) -> str:
    """A page with the tables of the results that it names."""
    return TABLE.sub(lambda match: f"{match[1]}{tables(match[2])}{match[3]}", page)


def results_of(name: str) -> Json:
    """The committed results of a study."""
    found: Json = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def tables(name: str) -> str:
    """Predicted and found; then a row for each arm."""
    results, study = results_of(name), load_lab_study(ROOT / f"studies/{name}.yaml")
    predicted = [
        outcome(
            claim,
            _of(results, claim.arm, claim.figure),
            claim.minus and _of(results, claim.minus, claim.figure),
            paired=True,
        )
        for claim in study.predictions
    ]
    rows = [row for arm in results["arms"] if (row := _row(results, arm))]
    lines = (f"| {' | '.join(cells)} |" for cells in (HEADS, ["---"] * len(HEADS), *rows))
    missing = ", ".join(results["not_finished"])
    notes = f"{results['problems']} problems an evaluation."
    notes += f" Not finished: {missing}." if missing else ""
    claims = claims_table(predicted).replace(" (held-out)", "")  # the one evaluation
    return "\n\n".join([claims, notes, "\n".join(lines)]) + "\n"


def _of(results: Json, arm: str, figure: str) -> Figure | None:
    """A figure after training, of the seeds that the arm and the baseline of every claim share."""
    by_seed = results["arms"][arm]
    common = [seed for seed in by_seed if all(seed in other for other in results["arms"].values())]
    if not common:
        return None
    values = np.array([[by_seed[seed]["after"][figure]] for seed in common])
    return Figure(value_SP=values, seeds=tuple(map(int, common)), problems=())


def _column(results: Json, arm: str, when: str, figure: str, seeds: Sequence[str]) -> Matrix:
    return np.array([[results["arms"][arm][seed][when][figure]] for seed in seeds], dtype=np.float64)


def _row(results: Json, arm: str) -> tuple[str, ...] | None:
    seeds = list(results["arms"][arm])
    if not seeds:
        return None
    after = _column(results, arm, "after", "success", seeds)
    shared = [seed for seed in seeds if seed in results["arms"]["full"]]
    difference = "–"
    if arm != "full" and len(shared) > 1:
        sides = (_column(results, which, "after", "success", shared) for which in (arm, "full"))
        difference = f"{difference_interval(*sides, paired=True):+.2f}"
    found = f"{mean_interval(after):.2f}" if len(seeds) > 1 else f"{after.mean():.2f}"

    def mean(figure: str) -> str:
        return f"{_column(results, arm, 'after', figure, seeds).mean():.0f}"

    return (
        f"`{arm}`",
        found,
        difference,
        mean("context_tokens"),
        mean("prompt_tokens_uncached"),
    )


def draw() -> None:
    """Success after training against what was read in all, a panel for each study."""
    names = [path.stem for path in sorted(RESULTS.glob("*.json"))]
    with canvas(5.5 * len(names), 4.6) as figure:
        for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
            results = results_of(name)
            for number, (arm, by_seed) in enumerate(results["arms"].items()):
                if by_seed:
                    success = mean_interval(_column(results, arm, "after", "success", list(by_seed)))
                    tokens = _column(results, arm, "after", "prompt_tokens", list(by_seed)).mean()
                    several = {"yerr": bars([success]), "capsize": 2, "elinewidth": 0.5} if len(by_seed) > 1 else {}
                    axes.errorbar([tokens], [success.mean], label=arm, linestyle="", **several, **arm_style(number))
            axes.set(title=name, xlabel="tokens read in an episode", ylabel="success", ylim=(-0.02, 1.02))
            axes.set_xlim(left=0)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
        figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
