"""Writes the tables of a page from the committed results of studies, docs/results/studies/NAME.json:

    python docs/scripts/studies.py docs/results/studies.md

A table stands between ``<!-- results NAME -->`` and ``<!-- end of results -->``; a test compares page and files. A
file is the ``results.json`` of a sweep, or holds its figures by seed alone. Then intervals are over seeds, on the
problems of the study, and the predictions of the study file are compared with these figures.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from condensegrpo.metrics.intervals import Interval
from condensegrpo.studies.lab.intervals import mean_interval
from condensegrpo.studies.lab.predictions import Figure, PredictionOutcome, outcome
from condensegrpo.studies.lab.results import claims_table
from condensegrpo.studies.lab.study import Prediction, load_lab_study

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
    """The predictions of a study and what was found; without predictions success by arm and evaluation."""
    results: Json = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    parts = [f"Measured {results['measured']}. {results['note']}"] if "note" in results else []
    if predicted := predictions_of(results, name):
        parts.append(claims_table(predicted))
    else:
        parts.append(_arms(results["evaluations"]))
    return "\n\n".join(parts) + "\n"


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

    return tuple(map(found, load_lab_study(ROOT / f"studies/{name}.yaml").predictions))


def _figure(results: Json, evaluation: str, arm: str, figure: str) -> Figure | None:
    for each in (arms for part in results["evaluations"] if part["name"] == evaluation for arms in part["arms"]):
        if each["arm"] == arm and figure in each["by_seed"]:
            values = each["by_seed"][figure]
            return Figure(value_SP=_column(values), seeds=tuple(map(int, values)), problems=())
    return None


def _arms(evaluations: Sequence[Json]) -> str:
    """A row for each arm, a column for each evaluation."""
    figure = next(iter(evaluations[0]["arms"][0]["by_seed"]))
    by_arm: dict[str, dict[str, str]] = {}
    for evaluation in evaluations:
        for arm in evaluation["arms"]:
            by_arm.setdefault(arm["arm"], {})[evaluation["name"]] = _cell(arm, figure)
    names = [evaluation["name"] for evaluation in evaluations]
    rows = [(f"`{arm}`", *(cells.get(name, "–") for name in names)) for arm, cells in by_arm.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in ((figure, *names), ["---"] * (len(names) + 1), *rows))


def _cell(arm: Json, figure: str) -> str:
    """A figure of an arm before and after training, with its interval over seeds (of one seed: over problems)."""
    values = arm["by_seed"][figure]
    column, share = _column(values), figure == "success"
    equal = share and len(set(values.values())) == 1  # then the problems give the interval its width
    cell_SP = column.repeat(arm["problems"], axis=1) if equal else column
    mean = Interval(*arm[figure]) if figure in arm else mean_interval(cell_SP, share=share)
    before = arm.get("success_before") if share else None
    return f"{mean:.3f}" if before is None else f"{before:.3f} → {mean:.3f}"


def _column(values: Mapping[str, float]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """(S, 1): a figure of each seed."""
    return np.array([[value] for value in values.values()], dtype=np.float64)


if __name__ == "__main__":
    main()
