"""Compares the predictions of a study with what was found. Pure functions.

The interval decides, at 95 % and over seeds and problems: a prediction holds if the whole interval is beyond its
threshold, fails if the whole interval is on the other side, and is undecided else, or with fewer than two seeds.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from condensegrpo.metrics.intervals import Interval
from condensegrpo.studies.lab.intervals import Matrix, difference_interval, mean_interval
from condensegrpo.studies.lab.study import Prediction


class Verdict(StrEnum):
    """What the results say of a prediction."""

    HOLDS = "holds"  # the whole interval is beyond the threshold
    FAILS = "fails"  # the whole interval is on the other side
    UNDECIDED = "undecided"  # the threshold is in the interval, a side has one seed, or the figure was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of one arm in one evaluation, after training."""

    value_SP: Matrix  # of every seed and problem, or (S, 1) where it is not known by problem
    seeds: tuple[int, ...]  # (S,)
    problems: tuple[str, ...]  # (P,); () for means over them

    def of_seeds(self, seeds: Collection[int]) -> "Figure":
        """The rows of some seeds."""
        rows = [row for row, seed in enumerate(self.seeds) if seed in seeds]
        return replace(self, value_SP=self.value_SP[rows], seeds=tuple(self.seeds[row] for row in rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionOutcome:
    """A prediction and what was found."""

    claim: str
    evaluation: str
    predicted: str  # the contrast and its threshold
    found: Interval | None  # None: it was not measured
    by_seed: Mapping[str, float]  # of the arm, or of the contrast if both arms have the same seeds
    paired: bool  # the difference was computed seed by seed
    verdict: Verdict


def outcome(prediction: Prediction, ours: Figure | None, theirs: Figure | None, *, paired: bool) -> PredictionOutcome:
    """Compare a prediction with the figures that it is about.

    Args:
        theirs: of the subtracted arm; None: the prediction is about an arm alone, or it was not measured.
        paired: the runs of a seed share their warm start, or are the same: compared are the seeds that both arms have.
    """
    found, values_S = None, np.array([])
    share = prediction.figure == "success"
    if ours is not None and prediction.minus is None:
        found, values_S = mean_interval(ours.value_SP, share=share), ours.value_SP.mean(axis=1)
    elif ours is not None and theirs is not None:
        both = {*ours.seeds} & {*theirs.seeds}  # while a sweep goes on, an arm has seeds that the other lacks
        paired = paired and bool(both)
        if paired:
            ours, theirs = ours.of_seeds(both), theirs.of_seeds(both)
        sides = ours.value_SP, prediction.times * theirs.value_SP
        if not ours.problems or ours.problems != theirs.problems:
            sides = sides[0].mean(axis=1, keepdims=True), sides[1].mean(axis=1, keepdims=True)
        found = difference_interval(*sides, paired=paired, share=share and prediction.times == 1)
        if ours.seeds == theirs.seeds:
            values_S = (sides[0] - sides[1]).mean(axis=1)
    fewest = min(len(side.seeds) for side in (ours, theirs) if side is not None) if found is not None else 0
    return PredictionOutcome(
        claim=prediction.claim,
        evaluation=prediction.evaluation,
        predicted=prediction.text,
        found=found,
        by_seed=dict(zip(map(str, ours.seeds), values_S.tolist(), strict=True)) if ours and values_S.size else {},
        paired=paired and prediction.minus is not None,
        verdict=_verdict(prediction, found) if found is not None and fewest > 1 else Verdict.UNDECIDED,
    )


def _verdict(prediction: Prediction, found: Interval) -> Verdict:
    lies_above, lies_below = found.low > prediction.threshold, found.high < prediction.threshold
    holds, fails = (lies_above, lies_below) if prediction.below is None else (lies_below, lies_above)
    return Verdict.HOLDS if holds else Verdict.FAILS if fails else Verdict.UNDECIDED
