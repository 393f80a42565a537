"""Metrics: what training and evaluation report about trajectories, each counted once and never by rows. Pure functions.

Legend of the suffixes: ``_N`` trajectories, ``_K`` turns.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from condensegrpo.trajectory import TOOL_ATTEMPTS, TOOL_SUCCESSES, ScoredTrajectory, Stop, Trajectory


class Interval(NamedTuple):
    """A mean with its 95 % confidence interval; the bounds are None where the data cannot tell."""

    mean: float
    low: float | None
    high: float | None


class GroupSignal(NamedTuple):
    """How much of a batch can teach anything, as shares in [0, 1]; a share of nothing is 0."""

    zero_variance_groups: float  # of the groups: those whose outcomes are all equal, groups of one included
    zero_advantage: float  # of the trajectories: those whose every turn has advantage 0
    correct_negative: float  # of the correct: those whose advantages sum to less than 0


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """The chance that at least one of k samples, drawn without replacement from ``samples``, is a success; unbiased.

    1 − C(n−c, k) / C(n, k)   (https://arxiv.org/abs/2107.03374, eq. 1), in exact integers
    """
    if not (0 <= successes <= samples and 1 <= k <= samples):
        raise ValueError(
            f"pass@k needs 0 <= successes <= samples and 1 <= k <= samples, found {successes} successes, {samples} "
            f"samples, k = {k}"
        )
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def mean_interval_by_problem(values: Sequence[float], problems: Sequence[str]) -> Interval:
    """The mean over all samples, with a 95 % interval that treats the samples of one problem as one cluster.

        se² = G/(G−1) · Σ_g (Σ_{i∈g} (v_i − mean))² / n²        G problems, n samples
        mean ± t·se,   t: the 97.5 % quantile of Student's t with G − 1 degrees of freedom

    Samples of one problem resemble each other: taken for independent they would make the interval too narrow (the
    cluster-robust variance of https://arxiv.org/abs/2411.00640, with the factor for few clusters). One problem alone
    says nothing about others: its bounds are None. Where all clusters agree the interval has no width.

    Args:
        values: one for each sample: 0 and 1 for successes, or any other finite number.
        problems: the problem of each sample.
    """
    if not values:
        raise ValueError("a mean needs at least one value")
    mean = math.fsum(values) / len(values)
    residual: dict[str, float] = defaultdict(float)
    for value, problem in zip(values, problems, strict=True):
        residual[problem] += value - mean
    clusters = len(residual)
    if clusters == 1:
        return Interval(mean, None, None)
    square = math.fsum(total * total for total in residual.values())
    reach = _student_quantile(clusters - 1) * math.sqrt(clusters / (clusters - 1) * square) / len(values)
    return Interval(mean, mean - reach, mean + reach)


def group_signal(
    outcome_N: Tensor, group_N: Tensor, advantage_NK: Tensor, *, correct_N: Tensor | None = None
) -> GroupSignal:
    """What share of a batch carries a signal.

    Args:
        outcome_N: float, the outcome that the advantages came from.
        group_N: int, the group of each trajectory.
        advantage_NK: float, 0 beyond a trajectory's turns.
        correct_N: float, correctness, where the outcome is something else; 1 is correct. None: the outcome is it.
    """
    outcomes: dict[int, set[float]] = defaultdict(set)
    for outcome, group in zip(outcome_N.tolist(), group_N.tolist(), strict=True):
        outcomes[group].add(outcome)
    judged_N = outcome_N if correct_N is None else correct_N
    return GroupSignal(
        zero_variance_groups=_share(len(seen) == 1 for seen in outcomes.values()),
        zero_advantage=_share((advantage_NK == 0).all(dim=1).tolist()),
        correct_negative=_share((advantage_NK.sum(dim=1) < 0)[judged_N == 1].tolist()),
    )


def summarise(scored: Sequence[ScoredTrajectory]) -> dict[str, float]:
    """The metrics of some scored trajectories, each counted once whatever its number of turns.

    Means over trajectories: ``success``, ``reward``, ``format_valid``, ``context_tokens`` (the largest context of a
    trajectory), ``turns``, ``output_tokens``, ``condensations`` (declared ones), ``seconds``, ``reward/<component>``
    (over those that have the component), ``stop/<reason>`` (every reason, as a share). Also ``context_tokens_max``,
    the largest of all, and ``trajectories``, their number. If any tool was called: ``tool_calls``, the mean number of
    calls, and ``tool_calls_valid``, the share of all calls that a tool answered without an error. Of none:
    ``trajectories`` alone.
    """
    if not scored:
        return {"trajectories": 0.0}
    trajectories = [each.trajectory for each in scored]
    scores = [each.score for each in scored]
    return {
        "trajectories": float(len(scored)),
        "success": _mean(score.correct for score in scores),
        "reward": _mean(score.total for score in scores),
        "format_valid": _mean(score.format_valid for score in scores),
        "context_tokens": _mean(score.context_tokens for score in scores),
        "context_tokens_max": float(max(score.context_tokens for score in scores)),
        "turns": _mean(len(each.turns) for each in trajectories),
        "output_tokens": _mean(each.output_tokens for each in trajectories),
        "condensations": _mean(sum(turn.condensation is not None for turn in each.turns) for each in trajectories),
        "seconds": _mean(each.seconds for each in trajectories),
        **{f"stop/{stop.value}": _share(each.stop is stop for each in trajectories) for stop in Stop},
        **_tool_calls(trajectories),
        **_component_means(scored),
    }


def _tool_calls(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewards = [turn.turn_rewards for each in trajectories for turn in each.turns]
    attempts = sum(earned.get(TOOL_ATTEMPTS, 0.0) for earned in rewards)
    successes = sum(earned.get(TOOL_SUCCESSES, 0.0) for earned in rewards)
    if not attempts:
        return {}
    return {"tool_calls": attempts / len(trajectories), "tool_calls_valid": successes / attempts}


def _component_means(scored: Sequence[ScoredTrajectory]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for each in scored:
        for name, value in each.score.components.items():
            values[name].append(value)
    return {f"reward/{name}": _mean(found) for name, found in sorted(values.items())}


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _share(flags: Iterable[bool]) -> float:
    return _mean(found) if (found := list(flags)) else 0.0


def _student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: exact for 1 and 2 degrees of freedom, then within 0.2 %.

    Cornish–Fisher series about the normal quantile (Abramowitz & Stegun 26.7.5).
    """
    if freedom == 1:
        return math.tan(0.475 * math.pi)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
