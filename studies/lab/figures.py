"""The figures of a study: arms × seeds, each evaluated on the same held-out problems. Pure functions.

Intervals are those of ``intervals.py``, 95 %, over seeds and problems.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from condensegrpo.metrics.intervals import Interval
from condensegrpo.studies.lab.cross_play import CrossPlay
from condensegrpo.studies.lab.intervals import (
    Matrix,
    could_find,
    difference_interval,
    interquartile_mean,
    mean_interval,
    new_seed_interval,
    probability_of_improvement,
)
from condensegrpo.studies.lab.predictions import Figure, PredictionOutcome
from condensegrpo.studies.lab.study import FIGURES

BySeed = Mapping[str, Mapping[str, float]]  # figure → seed → value


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedOutcome:
    """One evaluation of one run."""

    seed: int
    success: Mapping[str, float]  # problem → mean correctness of its samples after training
    context: Mapping[str, float]  # problem → mean largest context of its samples after training, tokens
    before: Mapping[str, float]  # metrics before training, such as success and context_tokens; none: not evaluated
    after: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFigures:
    """One arm in one evaluation."""

    arm: str
    seeds: tuple[int, ...]
    problems: int
    success: Interval
    new_seed: Interval | None  # where the success of a further seed is expected; None: not known
    success_iqm: float  # the interquartile mean over seeds
    context: Interval  # tokens, mean over problems of the largest context
    success_before: float | None  # before training, mean over seeds; None: not evaluated then
    context_before: float | None
    by_seed: BySeed  # after training: ``FIGURES`` and the metrics that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmComparison:
    """An arm against the baseline, on the same problems."""

    arm: str
    baseline: str
    paired: bool  # by seed: the runs of a seed share their warm start
    difference: Interval  # in success
    could_find: float | None  # the smallest effect that these seeds find with 80 % power; None: not known
    improvement: float  # probability that a seed of the arm is more successful than one of the baseline
    context_ratio: float  # context of the arm over that of the baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFigures:
    """All arms in one evaluation."""

    name: str
    arms: tuple[ArmFigures, ...]
    comparisons: tuple[ArmComparison, ...]  # of the arms that had the problems of the baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The held-out success of an arm at one step, with its band over seeds."""

    step: int
    success: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCurve:
    """The held-out success of an arm during training."""

    arm: str
    points: tuple[CurvePoint, ...]  # at the steps that all its seeds evaluated
    reached: Mapping[str, int | None]  # seed → first evaluated step with success of at least ``reach``; None: never


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFigures:
    """The results of a study; arms without a finished run are missing."""

    study: str
    question: str | None
    baseline: str
    reach: float
    metrics: tuple[str, ...]  # of the report, besides ``FIGURES``
    evaluations: tuple[EvaluationFigures, ...]
    curves: tuple[LearningCurve, ...]
    predictions: tuple[PredictionOutcome, ...]
    cross_play: tuple[CrossPlay, ...] = ()


def evaluation_figures(
    name: str,
    outcomes: Mapping[str, Sequence[SeedOutcome]],
    *,
    baseline: str,
    metrics: Sequence[str],
    shared: Collection[str] = (),
) -> EvaluationFigures:
    """The figures of an evaluation.

    Args:
        outcomes: arm → its runs, at least one. Where seeds have problems of their own, all intervals are over the means
            of seeds.
        metrics: to show besides ``FIGURES``.
        shared: arms whose runs share the warm starts of the baseline's, seed by seed: compared are the seeds of both,
            as where seeds have problems of their own.
    """
    nested = any(map(_problems_differ, outcomes.values()))
    success = {arm: _matrix([outcome.success for outcome in runs], nested) for arm, runs in outcomes.items()}
    context = {arm: _matrix([outcome.context for outcome in runs], nested) for arm, runs in outcomes.items()}
    problems = {arm: frozenset(runs[0].success) for arm, runs in outcomes.items()}
    return EvaluationFigures(
        name=name,
        arms=tuple(
            ArmFigures(
                arm=arm,
                seeds=tuple(outcome.seed for outcome in runs),
                problems=len(problems[arm]),
                success=mean_interval(success[arm]),
                new_seed=new_seed_interval(success[arm]),
                success_iqm=interquartile_mean(success[arm]),
                context=mean_interval(context[arm], share=False),
                success_before=_mean_before("success", runs),
                context_before=_mean_before("context_tokens", runs),
                by_seed={
                    metric: {str(outcome.seed): outcome.after[metric] for outcome in runs}
                    for metric in dict.fromkeys((*FIGURES, *metrics))
                    if all(metric in outcome.after for outcome in runs)
                },
            )
            for arm, runs in outcomes.items()
        ),
        comparisons=tuple(
            _compared(arm, outcomes[arm], baseline, outcomes[baseline], paired=arm in shared, nested=nested)
            for arm in outcomes
            if arm != baseline and problems[arm] == problems.get(baseline)
        ),
    )


def _compared(
    arm: str, ours: Sequence[SeedOutcome], baseline: str, theirs: Sequence[SeedOutcome], *, paired: bool, nested: bool
) -> ArmComparison:
    if paired or nested:
        both = {run.seed for run in ours} & {run.seed for run in theirs}
        ours, theirs = ([run for run in runs if run.seed in both] for runs in (ours, theirs))
    success = _matrix([run.success for run in ours], nested), _matrix([run.success for run in theirs], nested)
    our_context, their_context = (_matrix([run.context for run in runs], nested).mean() for runs in (ours, theirs))
    difference = difference_interval(*success, paired=paired)
    return ArmComparison(
        arm=arm,
        baseline=baseline,
        paired=paired,
        difference=difference,
        could_find=could_find(difference, min(len(ours), len(theirs))),
        improvement=probability_of_improvement(*success),
        context_ratio=float(our_context / their_context),
    )


def _mean_before(metric: str, runs: Sequence[SeedOutcome]) -> float | None:
    """A metric before training, mean over runs; None: one of them was not evaluated then."""
    return fmean(run.before[metric] for run in runs) if all(run.before for run in runs) else None


def figure_of(runs: Sequence[SeedOutcome], name: str) -> Figure | None:
    """A figure of an arm's runs; None: there is no run, or one of them did not measure it."""
    if not runs or any(name not in run.after for run in runs):
        return None
    seeds = tuple(run.seed for run in runs)
    by_problem = {"success": [run.success for run in runs], "context_tokens": [run.context for run in runs]}.get(name)
    if by_problem is not None and not _problems_differ(runs):
        return Figure(value_SP=_matrix(by_problem), seeds=seeds, problems=tuple(sorted(by_problem[0])))
    return Figure(value_SP=np.array([[run.after[name]] for run in runs]), seeds=seeds, problems=())


def learning_curve(arm: str, courses: Mapping[int, Mapping[int, float]], *, reach: float) -> LearningCurve:
    """The curve of an arm from the held-out success of its runs, at least one, by seed and step."""
    steps = sorted(set.intersection(*map(set, courses.values())))
    columns = ((step, np.array([[course[step]] for course in courses.values()])) for step in steps)
    return LearningCurve(
        arm=arm,
        points=tuple(CurvePoint(step=step, success=mean_interval(column)) for step, column in columns),
        reached={
            str(seed): min((step for step, success in course.items() if success >= reach), default=None)
            for seed, course in courses.items()
        },
    )


def _problems_differ(runs: Sequence[SeedOutcome]) -> bool:
    """Whether seeds have problems of their own, as with ``{seed}`` in an override of the task."""
    return any(run.success.keys() != runs[0].success.keys() for run in runs)


def _matrix(values: Sequence[Mapping[str, float]], nested: bool = False) -> Matrix:
    """Runs × problems, the problems in sorted order; if nested, a column: problems are part of a seed's variance.

    Of one run there is no such variance, and its problems give the interval.
    """
    if nested and len(values) > 1:
        return np.array([[fmean(run.values())] for run in values])
    problems = sorted(values[0])
    return np.array([[run[problem] for problem in problems] for run in values], dtype=np.float64)
