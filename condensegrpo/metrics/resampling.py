"""Bootstrap intervals of studies: several seeds of one arm, all evaluated on the same problems. Pure functions.

The success of seed s on problem p is a cell of a matrix. Seeds and problems are both samples of many, and the cells of
a row or a column resemble each other, so a bootstrap sample draws rows with replacement and, independently, columns:
the pigeonhole bootstrap (Owen 2007, https://doi.org/10.1214/07-AOAS122), which does not underestimate the variance of
a mean over crossed factors. Every arm is a stratum with its own seeds; the problems are those of all arms, drawn once
for both sides of a comparison. Aggregates are those that Agarwal et al. 2021 recommend for few runs
(https://arxiv.org/abs/2108.13264): the interquartile mean over seeds and the probability of improvement, with
percentile intervals (``scipy.stats.bootstrap``).

A bootstrap of values that are all equal has no width, and one seed has no rows to draw from. The interval is then that
of ``metrics.estimates`` instead: Wilson's, with each problem as one cluster, or Newcombe's for a difference.

Legend: _S seeds, _P problems, _B bootstrap samples.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from condensegrpo.metrics.estimates import Interval, Values, paired_difference, success_interval

Matrix = NDArray[np.float64]  # (S, P), a mean over the samples of a problem
Indices = NDArray[np.int64]  # (B, S) or (B, P); without B for the samples themselves
RESAMPLES = 2000
SEED = 0  # of the bootstrap, so that the same runs always give the same figures
TRIMMED = 0.25  # of the seeds on either side, for the interquartile mean


def mean_interval(value_SP: Matrix, *, share: bool = True) -> Interval:
    """The mean over seeds and problems.

    Args:
        share: the values are in [0, 1], so that values that are all equal still have an interval.
    """
    return _of_one(value_SP, lambda success_BS: success_BS.mean(axis=-1), share=share)


def interquartile_mean(value_SP: Matrix) -> Interval:
    """The mean of the seeds' means without the lowest and the highest quarter of the seeds, rounded down.

    5 seeds 0.1 0.8 0.8 0.9 1.0   ─▶   (0.8 + 0.8 + 0.9) / 3
    """
    from scipy.stats import trim_mean

    def trimmed(success_BS: Matrix) -> Matrix:
        return np.asarray(trim_mean(success_BS, TRIMMED, axis=-1))

    return _of_one(value_SP, trimmed, share=True)


def difference_interval(ours_SP: Matrix, theirs_SP: Matrix) -> Interval:
    """The mean of ``ours`` less that of ``theirs``, on the same problems in the same order."""

    def less(ours_BS: Matrix, theirs_BS: Matrix) -> Matrix:
        return np.asarray(ours_BS.mean(axis=-1) - theirs_BS.mean(axis=-1))

    interval = _of_two(ours_SP, theirs_SP, less)
    return interval or paired_difference(_values(ours_SP), _values(theirs_SP))


def probability_of_improvement(ours_SP: Matrix, theirs_SP: Matrix) -> Interval:
    """The probability that a seed of ``ours`` is more successful than one of ``theirs``; equal ones count one half.

    P(X > Y) = 1/(S_x S_y) Σ_i Σ_j s(x_i, y_j),  s = 1 if x_i > y_j, ½ if equal, else 0   (Agarwal et al. 2021)

    Where every bootstrap sample agrees, the interval is Wilson's for as many pairs as the smaller side has seeds.
    """

    def wins(ours_BS: Matrix, theirs_BS: Matrix) -> Matrix:
        ours_BSt, theirs_BSt = ours_BS[..., :, None], theirs_BS[..., None, :]
        return np.asarray(((ours_BSt > theirs_BSt) + 0.5 * (ours_BSt == theirs_BSt)).mean(axis=(-2, -1)))

    interval = _of_two(ours_SP, theirs_SP, wins)
    if interval is not None:
        return interval
    probability = float(wins(ours_SP.mean(axis=1), theirs_SP.mean(axis=1)))
    pairs = min(len(ours_SP), len(theirs_SP))
    return success_interval({str(pair): [probability] for pair in range(pairs)})


def _of_one(value_SP: Matrix, aggregate: Callable[[Matrix], Matrix], *, share: bool) -> Interval:
    """The interval of an aggregate of the seeds' means, (…, S) ─▶ (…)."""
    value = float(aggregate(value_SP.mean(axis=1)))
    drawn = [np.arange(size) for size in value_SP.shape if size > 1]

    def statistic(*indices: Indices, axis: int = -1) -> Matrix:
        seeds = indices[0] if len(value_SP) > 1 else None
        return aggregate(_means(value_SP, seeds, indices[-1] if value_SP.shape[1] > 1 else None))

    if len(value_SP) > 1 or (drawn and not share):
        low, high = _bootstrap(tuple(drawn), statistic)
        if low < high:
            return Interval(value, low, high)
    if not share:
        return Interval(value, value, value)
    wilson = success_interval(_values(value_SP))
    return Interval(value, min(wilson.low, value), max(wilson.high, value))


def _of_two(ours_SP: Matrix, theirs_SP: Matrix, aggregate: Callable[[Matrix, Matrix], Matrix]) -> Interval | None:
    """The interval of an aggregate of both sides' means; None: a side has one seed, or all bootstrap samples agree."""
    if ours_SP.shape[1] != theirs_SP.shape[1]:
        raise ValueError(f"comparing on the same problems: found {ours_SP.shape[1]} and {theirs_SP.shape[1]} problems")
    if min(len(ours_SP), *theirs_SP.shape) < 2:
        return None

    def statistic(ours: Indices, theirs: Indices, problems: Indices, axis: int = -1) -> Matrix:
        return aggregate(_means(ours_SP, ours, problems), _means(theirs_SP, theirs, problems))

    low, high = _bootstrap(tuple(map(np.arange, (len(ours_SP), *theirs_SP.shape))), statistic)
    value = float(aggregate(ours_SP.mean(axis=1), theirs_SP.mean(axis=1)))
    return Interval(value, low, high) if low < high else None


def _means(value_SP: Matrix, seeds: Indices | None, problems: Indices | None) -> Matrix:
    """The seeds' means in bootstrap samples of rows (…, S) and columns (…, P), float (…, S); None: as they are."""
    means_BS = value_SP.mean(axis=1) if problems is None else value_SP.T[problems].mean(axis=-2)
    if seeds is None:
        return np.asarray(means_BS)
    return np.asarray(means_BS[seeds] if problems is None else np.take_along_axis(means_BS, seeds, axis=-1))


def _bootstrap(samples: tuple[Indices, ...], statistic: Callable[..., Matrix]) -> tuple[float, float]:
    """The 2.5 % and 97.5 % quantiles of a statistic, every sample redrawn with replacement on its own."""
    from scipy.stats import bootstrap

    result = bootstrap(
        samples, statistic, vectorized=True, n_resamples=RESAMPLES, batch=500, method="percentile", rng=SEED
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def _values(value_SP: Matrix) -> Values:
    """Problem → the values of all seeds."""
    return {str(problem): column.tolist() for problem, column in enumerate(value_SP.T)}
