"""Writes the tables of a page from the committed results of studies, docs/results/studies/NAME.json:

    python docs/scripts/studies.py docs/results/studies.md

A table stands between ``<!-- results NAME -->`` and ``<!-- end of results -->``; a test compares page and files. A
file is the ``results.json`` of a sweep, or holds its figures by seed alone. Then intervals are over seeds, on the
problems of the study, and the predictions of the study file are compared with these figures.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from condensegrpo.config.study import Prediction, load_study
from condensegrpo.evaluation.predictions import Figure, PredictionOutcome, outcome
from condensegrpo.metrics.estimates import Interval
from condensegrpo.metrics.seeds import difference_interval, mean_interval, new_seed_interval
from condensegrpo.reporting.study_results import predictions_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results/studies"
TABLE = re.compile(r"(<!-- results (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
OUTCOMES = TypeAdapter(tuple[PredictionOutcome, ...])
Json = Mapping[str, Any]


def main() -> None:
    """Rewrite the pages that the command names."""
    for page in map(Path, sys.argv[1:]):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


def filled(page: str) -> str:
    """A page with the tables of the results that it names."""
    return TABLE.sub(lambda match: f"{match[1]}{tables(match[2])}{match[3]}", page)


def tables(name: str) -> str:
    """The predictions of a study and what was found; then a row for each evaluation, arm and figure."""
    results: Json = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    predicted = predictions_of(results, name)
    heads = (
        "evaluation",
        "arm",
        "figure",
        "by seed",
        "mean [95 %]",
        "a new seed, 95 %",
        f"− {results['baseline']} [95 %]",
    )
    rows = [row for evaluation in results["evaluations"] for row in _rows(evaluation, results["baseline"])]
    lines = (f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))
    parts = [f"Measured {results['measured']}. {results['note']}"] if "note" in results else []
    parts += [predictions_table(predicted)] if predicted else []
    return "\n\n".join([*parts, "\n".join(lines)]) + "\n"


def predictions_of(results: Json, name: str) -> tuple[PredictionOutcome, ...]:
    """The predictions as the sweep stored them, else those of the study file with the figures by seed."""
    if "predictions" in results:
        return OUTCOMES.validate_python(results["predictions"])
    paired = {
        (each["arm"], each["baseline"])
        for evaluation in results["evaluations"]
        for each in evaluation["comparisons"]
        if each["paired"]
    }

    def found(claim: Prediction) -> PredictionOutcome:
        ours = _figure(results, claim.evaluation, claim.arm, claim.figure)
        theirs = claim.minus and _figure(results, claim.minus_evaluation or claim.evaluation, claim.minus, claim.figure)
        same = claim.arm == claim.minus or (claim.arm, claim.minus) in paired
        return outcome(claim, ours, theirs or None, paired=same)

    return tuple(map(found, load_study(ROOT / f"studies/{name}.yaml").predictions))


def _figure(results: Json, evaluation: str, arm: str, figure: str) -> Figure | None:
    for each in (arms for part in results["evaluations"] if part["name"] == evaluation for arms in part["arms"]):
        if each["arm"] == arm and figure in each["by_seed"]:
            values = each["by_seed"][figure]
            return Figure(value_SP=_column(values), seeds=tuple(map(int, values)), problems=())
    return None


def _rows(evaluation: Json, baseline: str) -> Iterator[tuple[str, ...]]:
    by_arm = {arm["arm"]: arm for arm in evaluation["arms"]}
    compared = {each["arm"]: each for each in evaluation["comparisons"]}
    for name, arm in by_arm.items():
        for figure, values in arm["by_seed"].items():
            column, share = _column(values), figure == "success"
            equal = share and len(set(values.values())) == 1  # then the problems give the interval its width
            cell_SP = column.repeat(arm["problems"], axis=1) if equal else column
            mean = Interval(*arm[figure]) if figure in arm else mean_interval(cell_SP, share=share)
            known = share or len(values) > 1  # of one seed only success is known by problem
            new = new_seed_interval(column) if share else None
            difference = "–"
            if each := compared.get(name):
                sides = (values, by_arm[baseline]["by_seed"][figure])
                if each["paired"]:  # in the seeds that both have
                    sides = tuple({seed: side[seed] for seed in values if seed in sides[1]} for side in sides)
                interval = difference_interval(*map(_column, sides), paired=each["paired"], share=share)
                interval = Interval(*each["difference"]) if share and "difference" in each else interval
                spread = interval if known else interval.mean
                difference = f"{spread:+.3f}{', paired' if each['paired'] else ''}"
            digits = ", ".join(f"{value:.4g}" for value in values.values())
            bounds = f"{new.low:.2f} … {new.high:.2f}" if new else "–"
            yield (
                evaluation["name"],
                f"`{name}`",
                figure,
                digits,
                f"{mean if known else mean.mean:.3f}",
                bounds,
                difference,
            )


def _column(values: Mapping[str, float]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """(S, 1): a figure of each seed."""
    return np.array([[value] for value in values.values()], dtype=np.float64)


if __name__ == "__main__":
    main()
