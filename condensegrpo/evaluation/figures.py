"""The figures of an evaluation and of a comparison of condensers. Pure functions.

Trajectories are counted, clustered by problem; differences of condensers are paired by problem.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from condensegrpo.config.load import HELD_OUT
from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.scored_trajectory import ScoredTrajectory, TrajectoryStats, mean_curve
from condensegrpo.metrics.intervals import Interval, paired_difference, pass_at_k, success_interval
from condensegrpo.metrics.trajectories import Fetches, fetches, summarise


def evaluation_of(
    name: str, figures: Sequence[TrajectoryStats], *, seed: int, seconds: float, condensing: float = 0.0
) -> Evaluation:
    """The figures of some trajectories, equally many of each problem, in any order."""
    correct: dict[str, list[float]] = defaultdict(list)
    for trajectory in figures:
        correct[trajectory.group_id].append(trajectory.correct)  # two problems may have one id
    samples = len(next(iter(correct.values())))
    solved = [sum(value >= 1 for value in values) for values in correct.values()]
    mean, low, high = success_interval(correct)
    information = mean_curve([trajectory.information for trajectory in figures])
    return Evaluation(
        name=name,
        problems=len(solved),
        samples=samples,
        seed=seed,
        success=mean,
        success_low=low,
        success_high=high,
        pass_at={
            k: fmean(pass_at_k(successes, samples, k) for successes in solved)
            for k in (1 << power for power in range(samples.bit_length()))
        },
        metrics=summarise(figures),
        information=information if any(value is not None for value in information) else (),
        seconds=seconds,
        condensing=condensing,
    )


def evaluation_metrics(result: Evaluation) -> dict[str, float]:
    """An evaluation as metrics: ``eval/success``, or ``eval/<variant>/success`` for a variant."""
    return {f"{metric_prefix(result.name)}/{key}": value for key, value in result.figures().items()}


def metric_prefix(evaluation: str) -> str:
    """What the metrics of an evaluation begin with: ``eval``, or ``eval/<variant>``."""
    return "eval" if evaluation == HELD_OUT else f"eval/{evaluation}"


def metrics_of(evaluation: str, line: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an evaluation in a line of a run's metrics, without their prefix."""
    prefix = f"{metric_prefix(evaluation)}/"
    return {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}


def evaluations_in(metrics: Iterable[str]) -> dict[str, str]:
    """The evaluations whose success is among some metrics, each with its ``metric_prefix``.

    ``eval/reward/success`` alone is a part of the reward; a variant of the name has an interval of its success, too.
    """
    known = dict.fromkeys(metrics)
    prefixes = [key.removesuffix("/success") for key in known if key.startswith("eval/") and key.endswith("/success")]
    parts = {each for each in prefixes if each.endswith("/reward") and f"{each}/success_low" not in known}
    of_evaluations = (prefix for prefix in prefixes if prefix not in parts)
    return {HELD_OUT if prefix == "eval" else prefix.removeprefix("eval/"): prefix for prefix in of_evaluations}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A condenser under a budget."""

    condenser: str
    options: Mapping[str, object]
    budget: int | None  # tokens of a prompt at most; None: as many as the model has positions for

    @property
    def label(self) -> str:
        """``last_k(keep_last=3)``."""
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.condenser}({options})" if options else self.condenser

    @property
    def name(self) -> str:
        """``last_k(keep_last=3) within 96 tokens``; unique in a comparison."""
        return self.label if self.budget is None else f"{self.label} within {self.budget} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderFigures:
    """The results of one contender. Means are over trajectories."""

    contender: Contender
    success: Interval  # 95 %, clustered by problem
    calls: float  # of the policy, texts for the condenser among them
    peak_tokens: float  # the largest prompt of a trajectory
    picture_tokens: float  # of peak_tokens, those that stand for pictures
    prompt_tokens: float  # the prompts of all its turns
    prompt_tokens_uncached: float  # of these, tokens that the prompt of the turn before does not begin with
    output_tokens: float  # sampled in all its turns
    price: float  # of all its calls, in tokens read uncached
    condensations: float  # declared ones
    refetches: float  # calls that repeat a call whose result is no longer in the context
    refetch_rate: float  # share of all calls that got a tool result
    seconds: float
    condensing: float  # share of the seconds in which at least one episode was at its condenser


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderDifference:
    """Success of one contender less that of another, paired by problem."""

    ours: str
    theirs: str
    budget: int | None  # of both, or of the one that has one
    success: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One policy under several condensers."""

    model: str
    step: int | None  # optimiser steps that its weights have taken; None: not known
    problems: int
    samples: int  # trajectories a problem
    seed: int
    figures: tuple[ContenderFigures, ...]  # in the order of the request
    differences: tuple[ContenderDifference, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderResult:
    """The evaluation of one contender."""

    figures: ContenderFigures
    correct: Mapping[str, Sequence[float]]  # group of a problem → correctness of its trajectories
    evaluation: Evaluation


def contender_result(
    contender: Contender, scored: Sequence[ScoredTrajectory], evaluation: Evaluation
) -> ContenderResult:
    """The figures of a contender from its trajectories."""
    correct: dict[str, list[float]] = defaultdict(list)
    for each in scored:
        correct[each.figures.group_id].append(each.figures.correct)  # two problems may have one id
    trajectories = [each.trajectory for each in scored]
    counts = [fetches(trajectory) for trajectory in trajectories]
    total = Fetches(sum(count.calls for count in counts), sum(count.refetches for count in counts))
    figures = ContenderFigures(
        contender=contender,
        success=success_interval(correct),
        calls=fmean(each.figures.turns for each in scored),
        peak_tokens=fmean(each.figures.context_tokens for each in scored),
        picture_tokens=fmean(each.figures.picture_tokens for each in scored),
        prompt_tokens=fmean(each.figures.prompt_tokens for each in scored),
        prompt_tokens_uncached=fmean(each.figures.prompt_tokens_uncached for each in scored),
        output_tokens=fmean(each.figures.output_tokens for each in scored),
        price=fmean(each.figures.price for each in scored),
        condensations=fmean(each.figures.condensations for each in scored),
        refetches=total.refetches / len(trajectories),
        refetch_rate=total.rate,
        seconds=evaluation.seconds,
        condensing=evaluation.condensing / evaluation.seconds if evaluation.seconds else 0.0,
    )
    return ContenderResult(figures=figures, correct=correct, evaluation=evaluation)


def comparison(model: str, entries: Sequence[ContenderResult], *, step: int | None = None) -> Comparison:
    """The figures of all contenders, and the differences between those that have one budget."""
    first = entries[0].evaluation
    return Comparison(
        model=model,
        step=step,
        problems=first.problems,
        samples=first.samples,
        seed=first.seed,
        figures=tuple(entry.figures for entry in entries),
        differences=tuple(
            ContenderDifference(
                ours=ours.figures.contender.label,
                theirs=theirs.figures.contender.label,
                budget=max(_budgets(ours, theirs), default=None),
                success=paired_difference(ours.correct, theirs.correct),
            )
            for index, ours in enumerate(entries)
            for theirs in entries[:index]
            if len(_budgets(ours, theirs)) < 2
        ),
    )


def _budgets(*entries: ContenderResult) -> set[int]:
    """The budgets that contenders have."""
    return {budget for entry in entries if (budget := entry.figures.contender.budget) is not None}
