"""Figures of studies: several seeds of one arm, all evaluated on the same problems. Pure functions.

The success of seed s on problem p is a cell of a matrix, y_sp = μ + a_s + b_p + e_sp. Seeds and problems are both
samples of many, so the variance of the mean has a part of each; what both contain of e is counted once:

    V = v_S/S + v_P/P − v_e/(S·P)     v_S, v_P: variances of the rows' and columns' means; v_e: of the residuals
    mean ± t(ν)·√V                    ν = V² / Σ part²/freedom   (Satterthwaite 1946, https://doi.org/10.2307/3002019)

A difference of two arms is that of their rows where the runs of a seed share a warm start (a paired t), and has the
sum of both arms' variances elsewhere (Welch); the difficulty of a problem cancels out of both. The interval of a new
seed is that of a further row on these problems, mean ± t(S−1)·√(v_S·(1 + 1/S)). docs/how-to/studies.md has how often
the intervals contain the truth: with fewer than ``ENOUGH`` seeds none of them can know of a collapse that is rare.

Where all values are equal, or an arm has one seed, the interval of a success is that of ``metrics.intervals``, with
each problem as one cluster: Wilson's, or Newcombe's for a difference.

Legend: _S seeds, _P problems.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from condensegrpo.metrics.intervals import Interval, Values, paired_difference, success_interval

Matrix = NDArray[np.float64]  # (S, P), a mean over the samples of a problem
ENOUGH = 10  # seeds
POWER = 0.8  # chance that a study finds an effect of ``detectable_effect``
TRIMMED = 0.25  # of the seeds on either side, for the interquartile mean


class _Part(NamedTuple):
    """A part of the variance of a mean; the residuals' is subtracted."""

    variance: float
    freedom: int


def mean_interval(value_SP: Matrix, *, share: bool = True) -> Interval:
    """The mean over seeds and problems; a column of one problem has the interval over seeds alone.

    Args:
        share: the values are in [0, 1], and so are the bounds.
    """
    seeds, problems = value_SP.shape
    interval = _student(float(value_SP.mean()), _parts(value_SP)) if seeds > 1 or not share else None
    if interval is None and share and problems > 1:
        return success_interval(_values(value_SP))
    interval = interval or Interval(*[float(value_SP.mean())] * 3)
    return _clipped(interval, 0.0) if share else interval


def interquartile_mean(value_SP: Matrix) -> float:
    """The mean of the seeds' means without the lowest and the highest quarter of the seeds, rounded down.

    5 seeds 0.1 0.8 0.8 0.9 1.0   ─▶   (0.8 + 0.8 + 0.9) / 3
    """
    from scipy.stats import trim_mean

    return float(trim_mean(value_SP.mean(axis=1), TRIMMED))


def new_seed_interval(value_SP: Matrix) -> Interval | None:
    """Where the success of one further seed on these problems is expected, 95 %; None: one seed, or all are equal."""
    seeds = len(value_SP)
    spread = float(value_SP.mean(axis=1).var(ddof=1)) if seeds > 1 else 0.0
    interval = _student(float(value_SP.mean()), [_Part(spread * (1 + 1 / seeds), seeds - 1)])
    return interval and _clipped(interval, 0.0)


def difference_interval(ours_SP: Matrix, theirs_SP: Matrix, *, paired: bool, share: bool = True) -> Interval:
    """The mean of ``ours`` less that of ``theirs``, on the same problems in the same order.

    Args:
        paired: the rows of both are the same seeds in the same order, and share their warm starts.
        share: as of ``mean_interval``.
    """
    if ours_SP.shape[1] != theirs_SP.shape[1]:
        raise ValueError(f"comparing on the same problems: found {ours_SP.shape[1]} and {theirs_SP.shape[1]} problems")
    mean, columns_P = float(ours_SP.mean() - theirs_SP.mean()), ours_SP.mean(axis=0) - theirs_SP.mean(axis=0)
    interval = None
    if paired and len(ours_SP) > 1:
        interval = _student(mean, _parts(ours_SP - theirs_SP))
    elif min(len(ours_SP), len(theirs_SP)) > 1:
        sides = [part for side_SP in (ours_SP, theirs_SP) for part in _parts(side_SP, with_problems=False)]
        interval = _student(mean, [*sides, *_of_means(columns_P)])
    if interval is None and share and ours_SP.shape[1] > 1:
        return paired_difference(_values(ours_SP), _values(theirs_SP))
    interval = interval or Interval(mean, mean, mean)
    return _clipped(interval, -1.0) if share else interval


def detectable_effect(deviation: float, seeds: int) -> float:
    """The smallest true effect that a two-sided t test over seeds finds at 5 % with 80 % power.

    δ = λ·s/√S     λ: P(T > t(S−1, 0.975)) = 0.8 of a noncentral T with S−1 degrees of freedom and noncentrality λ

    Cohen 1988, Statistical Power Analysis for the Behavioral Sciences, 2.3 to 2.5; the other tail is neglected (below
    10⁻⁵). Of two arms that are not paired the test has more degrees of freedom, so that δ is slightly too large.

        S = 3: 3.26 s    S = 5: 1.68 s    S = 10: 1.00 s    S = 20: 0.66 s

    Args:
        deviation: s, over seeds, of a figure or a difference; for arms that are not paired √(s² + s'²).
        seeds: of one there is no test, and nothing is found.
    """
    from scipy.special import nctdtrinc, stdtrit

    if seeds < 2:
        return math.inf
    noncentrality = nctdtrinc(seeds - 1, 1 - POWER, stdtrit(seeds - 1, 0.975))
    return float(noncentrality) * deviation / math.sqrt(seeds)


def could_find(found: Interval, seeds: int) -> float | None:
    """The smallest true effect that is found at 5 % with 80 % power where intervals are as wide as ``found``.

    δ = h·λ/t     h: the half of the interval that no bound cuts off; λ, t: as of ``detectable_effect``

    h has the problems' part of the variance too. λ/t hardly depends on freedom: 1.31 with 3 seeds, 1.43 with many.

    Args:
        seeds: of the smaller side; of one nothing is known, None.
    """
    from scipy.special import stdtrit

    if seeds < 2:
        return None
    reach = max(found.high - found.mean, found.mean - found.low)
    return detectable_effect(reach * math.sqrt(seeds) / float(stdtrit(seeds - 1, 0.975)), seeds)


def probability_of_improvement(ours_SP: Matrix, theirs_SP: Matrix) -> float:
    """The share of pairs in which a seed of ``ours`` is more successful than one of ``theirs``; equal ones count half.

    P(X > Y) = 1/(S_x S_y) Σ_i Σ_j s(x_i, y_j),  s = 1 if x_i > y_j, ½ if equal, else 0

    Agarwal et al. 2021, https://arxiv.org/abs/2108.13264.
    """
    ours, theirs = ours_SP.mean(axis=1)[:, None], theirs_SP.mean(axis=1)[None, :]
    return float(((ours > theirs) + 0.5 * (ours == theirs)).mean())


def _parts(value_SP: Matrix, *, with_problems: bool = True) -> list[_Part]:
    """The parts of the variance of a matrix's mean, without those of which there is one row or column."""
    seeds, problems = value_SP.shape
    rows_S, columns_P = value_SP.mean(axis=1), value_SP.mean(axis=0)
    parts = [*_of_means(rows_S), *(_of_means(columns_P) if with_problems else [])]
    if seeds > 1 and problems > 1:
        freedom = (seeds - 1) * (problems - 1)
        residuals = value_SP - rows_S[:, None] - columns_P + value_SP.mean()
        parts.append(_Part(-float(np.square(residuals).sum()) / freedom / value_SP.size, freedom))
    return parts


def _of_means(mean_N: Matrix) -> list[_Part]:
    return [_Part(float(mean_N.var(ddof=1)) / len(mean_N), len(mean_N) - 1)] if len(mean_N) > 1 else []


def _student(mean: float, parts: Sequence[_Part]) -> Interval | None:
    """The t interval of a mean; None: it does not vary."""
    from scipy.special import stdtrit

    largest = max((part.variance for part in parts), default=0.0)
    variance = max(math.fsum(part.variance for part in parts), largest)
    if variance < 1e-18:  # rounding
        return None
    freedom = variance**2 / math.fsum(part.variance**2 / part.freedom for part in parts)
    reach = float(stdtrit(freedom, 0.975)) * math.sqrt(variance)
    return Interval(mean, mean - reach, mean + reach)


def _clipped(interval: Interval, least: float) -> Interval:
    """The interval of a figure that lies between ``least`` and 1."""
    return Interval(interval.mean, max(interval.low, least), min(interval.high, 1.0))


def _values(value_SP: Matrix) -> Values:
    """Problem → the values of all seeds."""
    return {str(problem): column.tolist() for problem, column in enumerate(value_SP.T)}
