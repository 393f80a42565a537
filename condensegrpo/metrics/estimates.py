"""Estimates of a policy's success from samples: pass@k, and means with confidence intervals. Pure functions.

Samples of one problem resemble each other, so a problem is the unit: its samples form one cluster of the variance, and
the bootstrap draws whole problems with replacement, each with all its samples (the cluster bootstrap,
https://doi.org/10.1017/CBO9780511802843, ch. 3.8). Suffix _G: problems; _R: resamples.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

RESAMPLES = 10_000
Values = Mapping[str, Sequence[float]]  # problem → the values of its samples, at least one each


class Interval(NamedTuple):
    """A mean with its 95 % confidence interval; the bounds are None with a single problem."""

    mean: float
    low: float | None
    high: float | None


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

    Treating samples of one problem as independent would make the interval too narrow (the cluster-robust variance of
    https://arxiv.org/abs/2411.00640, with the factor for few clusters). With a single problem the bounds are None. If
    all clusters agree the interval has no width. Every sum is exact before it is rounded, so the result does not
    depend on the order of the samples.

    Args:
        values: one for each sample: 0 and 1 for successes, or any other finite number.
        problems: the problem of each sample.
    """
    if not values:
        raise ValueError("a mean needs at least one value")
    mean = math.fsum(values) / len(values)
    residuals: dict[str, list[float]] = defaultdict(list)
    for value, problem in zip(values, problems, strict=True):
        residuals[problem].append(value - mean)
    clusters = len(residuals)
    if clusters == 1:
        return Interval(mean, None, None)
    square = math.fsum(math.fsum(own) ** 2 for own in residuals.values())
    reach = _student_quantile(clusters - 1) * math.sqrt(clusters / (clusters - 1) * square) / len(values)
    return Interval(mean, mean - reach, mean + reach)


def bootstrap_interval(values: Values, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The mean over all samples, with the 2.5 % and 97.5 % quantiles of the means of resampled problems.

        mean* = Σ_g s_g / Σ_g n_g      over G problems g drawn with replacement; s_g: sum, n_g: number of its samples

    With a single problem the bounds are None. If all problems agree the interval has no width, which does not mean
    that the rate is known exactly.

    Raises:
        ValueError: there is no problem, or one without a sample.
    """
    total_G, size_G = _sums(values)
    mean = float(total_G.sum() / size_G.sum())
    if len(values) == 1:
        return Interval(mean, None, None)
    generator = torch.Generator().manual_seed(seed)
    drawn_RG = torch.randint(len(values), (resamples, len(values)), generator=generator)
    means_R = total_G[drawn_RG].sum(1) / size_G[drawn_RG].sum(1)
    low, high = torch.quantile(means_R, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(mean, low, high)


def paired_difference(ours: Values, theirs: Values, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """``ours`` minus ``theirs``, paired by problem, so that the difficulty of a problem cancels out.

        mean_g (mean of ours_g − mean of theirs_g), each problem counted once; interval as in ``bootstrap_interval``

    Raises:
        ValueError: the two do not have the same problems.
    """
    if ours.keys() != theirs.keys():
        raise ValueError(
            f"comparing by problem: {len(ours.keys() ^ theirs.keys())} problems are on one side only; both sides need "
            f"the same problems"
        )
    means = {problem: statistics.fmean(ours[problem]) - statistics.fmean(theirs[problem]) for problem in sorted(ours)}
    return bootstrap_interval({problem: [value] for problem, value in means.items()}, seed=seed, resamples=resamples)


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


def _sums(values: Values) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and numbers of samples by problem, in the order of their names, so that the order given does not matter."""
    empty = [problem for problem, samples in values.items() if not len(samples)]
    if empty or not values:
        raise ValueError(f"a bootstrap needs at least one sample of every problem, found none for {empty or 'any'}")
    ordered = [values[problem] for problem in sorted(values)]
    total_G = torch.tensor([sum(samples) for samples in ordered], dtype=torch.float64)
    return total_G, torch.tensor([len(samples) for samples in ordered], dtype=torch.float64)
