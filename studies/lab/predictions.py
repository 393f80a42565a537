"""Compares the predictions of a study with what was found. Pure functions.

The interval decides, at 95 % and over seeds and problems: a prediction holds if the whole interval is beyond its
threshold, fails if the whole interval is on the other side, and is undecided else, or with fewer than two seeds. There
is no verdict before all seeds of its arms are done: looking several times finds more than there is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from condensegrpo.metrics.intervals import Interval
from condensegrpo.studies.lab.intervals import (
    Matrix,
    could_find,
    detectable_effect,
    difference_interval,
    mean_interval,
)
from condensegrpo.studies.lab.study import EFFECTS, LabStudy, Prediction


class Verdict(StrEnum):
    """What the results say of a prediction."""

    HOLDS = "holds"  # the whole interval is beyond the threshold
    FAILS = "fails"  # the whole interval is on the other side
    BY_CONSTRUCTION = "by construction"  # the study file says so, and it does not fail
    UNDECIDED = "undecided"  # the threshold is in the interval, or there is none: one seed, not measured, no variance


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of one arm in one evaluation, after training."""

    value_SP: Matrix  # of every seed and problem, or (S, 1) where it is not known by problem
    seeds: tuple[int, ...]  # (S,)
    problems: tuple[str, ...]  # (P,); () for means over them


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionOutcome:
    """A prediction and what was found."""

    claim: str
    evaluation: str
    predicted: str  # the contrast and its threshold
    found: Interval | None  # None: it was not measured
    by_seed: Mapping[str, float]  # of the arm, or of the contrast if both arms have the same seeds
    paired: bool  # the difference was computed seed by seed
    verdict: Verdict | None  # None: some of its runs are not done
    could_find: float | None = None  # the smallest effect that these seeds find with 80 % power; None: not known
    done: str = ""  # "12 of 20 runs", without a verdict


def unfinished(prediction: Prediction, done: str) -> PredictionOutcome:
    """A prediction some of whose runs are not done."""
    return PredictionOutcome(
        claim=prediction.claim,
        evaluation=prediction.evaluation,
        predicted=prediction.text,
        found=None,
        by_seed={},
        paired=False,
        verdict=None,
        done=done,
    )


def outcome(prediction: Prediction, ours: Figure | None, theirs: Figure | None, *, paired: bool) -> PredictionOutcome:
    """Compare a prediction with the figures that it is about.

    Args:
        theirs: of the subtracted arm; None: the prediction is about an arm alone, or it was not measured.
        paired: both sides have the same seeds, and the runs of a seed share their warm start, or are the same.
    """
    found, least, values_S = None, None, np.array([])
    share = prediction.figure == "success"
    if ours is not None and prediction.minus is None:
        found, values_S = mean_interval(ours.value_SP, share=share), ours.value_SP.mean(axis=1)
        least = could_find(found, len(ours.seeds))
    elif ours is not None and theirs is not None:
        sides = ours.value_SP, prediction.times * theirs.value_SP
        if not ours.problems or ours.problems != theirs.problems:
            sides = sides[0].mean(axis=1, keepdims=True), sides[1].mean(axis=1, keepdims=True)
        found = difference_interval(*sides, paired=paired, share=share and prediction.times == 1)
        least = could_find(found, min(len(ours.seeds), len(theirs.seeds)))
        if ours.seeds == theirs.seeds:
            values_S = (sides[0] - sides[1]).mean(axis=1)
    if share and found is not None and found.low == found.high:
        least = None  # all seeds agree, and how much problems vary is not known
    return PredictionOutcome(
        claim=prediction.claim,
        evaluation=prediction.evaluation,
        predicted=prediction.text,
        found=found,
        by_seed=dict(zip(map(str, ours.seeds), values_S.tolist(), strict=True)) if ours and values_S.size else {},
        paired=paired and prediction.minus is not None,
        verdict=Verdict.UNDECIDED if found is None or least is None else _verdict(prediction, found),
        could_find=least,
    )


def _verdict(prediction: Prediction, found: Interval) -> Verdict:
    lies_above, lies_below = found.low > prediction.threshold, found.high < prediction.threshold
    holds, fails = (lies_above, lies_below) if prediction.below is None else (lies_below, lies_above)
    if prediction.by_construction and not fails:
        return Verdict.BY_CONSTRUCTION
    return Verdict.HOLDS if holds else Verdict.FAILS if fails else Verdict.UNDECIDED


def power_lines(study: LabStudy) -> Iterator[str]:
    """For each prediction of a study the effect that its seeds find, by the deviation of a pilot.

    A contrast is underpowered if its threshold is smaller; a threshold of 0 names no size.
    """
    for each in study.predictions:
        if each.pilot_sd is None or each.by_construction:
            why = "by construction" if each.by_construction else "its power is not known (pilot_sd)"
            yield f"{each.claim}: {why}"
            continue
        least = detectable_effect(each.pilot_sd, len(study.seeds))
        contrast = each.minus is not None or each.figure in EFFECTS
        weak = contrast and 0 < abs(each.threshold) < least
        mark = f": *underpowered*, the threshold is {each.threshold:g}" if weak else ""
        yield f"{each.claim}: {len(study.seeds)} seeds find effects >= {least:.3g} with 80 % power{mark}"
