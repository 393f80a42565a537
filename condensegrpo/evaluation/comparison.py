"""The figures of a comparison of condensers: one policy, the same problems, condensers × budgets. Pure functions.

Everything is counted in trajectories and clustered by problem; differences are paired by problem.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.trajectory import ScoredTrajectory
from condensegrpo.metrics.estimates import Interval, bootstrap_interval, paired_difference
from condensegrpo.metrics.refetches import fetches


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a comparison needs of one trajectory."""

    problem_id: str
    correct: float  # in [0, 1]
    peak_tokens: int  # the largest prompt of any turn
    summed_tokens: int  # the prompts of all turns
    turns: int
    condensations: int  # declared ones
    calls: int  # that were answered with a tool result
    refetches: int  # of these, the ones that ask once more for what no result in sight holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A condenser under a budget."""

    condenser: str
    options: Mapping[str, Any]
    budget: int | None  # tokens of a prompt at most; None: as many as the model has positions for

    @property
    def label(self) -> str:
        """``last_k(keep_last=3)``."""
        told = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.condenser}({told})" if told else self.condenser

    @property
    def name(self) -> str:
        """``last_k(keep_last=3) within 96 tokens``; unique in a comparison."""
        return self.label if self.budget is None else f"{self.label} within {self.budget} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one contender came to. Means are over trajectories."""

    contender: Contender
    success: Interval  # 95 %, by the bootstrap over problems
    peak_tokens: float
    summed_tokens: float
    turns: float
    condensations: float
    refetches: float  # a trajectory
    refetch_rate: float  # share of all calls
    seconds: float
    condensing: float  # share of the seconds in which at least one episode was at its condenser


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Success of one contender less that of another, paired by problem."""

    ours: str
    theirs: str
    budget: int | None  # of both, or of ours where theirs has none
    success: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One policy under several condensers."""

    model: str
    problems: int
    samples: int  # trajectories a problem
    seed: int
    figures: tuple[Figures, ...]  # in the order asked for
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The trajectories of one contender."""

    contender: Contender
    outcomes: tuple[Outcome, ...]
    evaluation: Evaluation


def outcome_of(scored: ScoredTrajectory) -> Outcome:
    """The outcome of a scored trajectory."""
    one, found = scored.trajectory, fetches(scored.trajectory)
    return Outcome(
        problem_id=one.problem_id,
        correct=scored.score.correct,
        peak_tokens=one.max_context_tokens,
        summed_tokens=sum(len(turn.prompt_ids) for turn in one.turns),
        turns=len(one.turns),
        condensations=sum(turn.condensation is not None for turn in one.turns),
        calls=found.calls,
        refetches=found.refetches,
    )


def comparison(model: str, played: Sequence[Played]) -> Comparison:
    """The figures of all contenders, and the differences between those that have one budget.

    Raises:
        ValueError: there is nobody to compare, or not everybody met the same problems.
    """
    if not played:
        raise ValueError("a comparison needs at least one condenser")
    first = played[0].evaluation
    return Comparison(
        model=model,
        problems=first.problems,
        samples=first.samples,
        seed=first.seed,
        figures=tuple(_figures(one) for one in played),
        differences=tuple(
            _difference(ours, theirs)
            for place, ours in enumerate(played)
            for theirs in played[:place]
            if theirs.contender.budget in (ours.contender.budget, None)
        ),
    )


def _figures(played: Played) -> Figures:
    found, evaluation = played.outcomes, played.evaluation
    calls, refetches = sum(one.calls for one in found), sum(one.refetches for one in found)
    return Figures(
        contender=played.contender,
        success=bootstrap_interval(_correct(found)),
        peak_tokens=fmean(one.peak_tokens for one in found),
        summed_tokens=fmean(one.summed_tokens for one in found),
        turns=fmean(one.turns for one in found),
        condensations=fmean(one.condensations for one in found),
        refetches=refetches / len(found),
        refetch_rate=refetches / calls if calls else 0.0,
        seconds=evaluation.seconds,
        condensing=evaluation.condensing / evaluation.seconds if evaluation.seconds else 0.0,
    )


def _difference(ours: Played, theirs: Played) -> Difference:
    return Difference(
        ours=ours.contender.label,
        theirs=theirs.contender.label,
        budget=ours.contender.budget,
        success=paired_difference(_correct(ours.outcomes), _correct(theirs.outcomes)),
    )


def _correct(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = defaultdict(list)
    for one in outcomes:
        values[one.problem_id].append(one.correct)
    return values
