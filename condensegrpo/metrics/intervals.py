"""Intervals of a success rate: means of samples with 95 % confidence, differences of two, and pass@k. Pure functions.

Samples of one problem resemble each other, so a problem is one cluster: n samples of G problems tell as much as n_eff
independent samples, G <= n_eff <= n. The intervals are Wilson's for n_eff samples, which keep a width where every
sample succeeds or fails.

    v     = G/(G−1) · Σ_g (Σ_{i∈g} (x_i − p))² / n²       variance of the mean p that treats problems as clusters
    n_eff = p(1−p)/v · n/(n−1) · (z/t)²                   n over the design effect; limited to [(Σm)²/Σm², n]
    low, high = (p + z²/2n_eff ± z·√(p(1−p)/n_eff + z²/4n_eff²)) / (1 + z²/n_eff)

m: samples of a problem; z: 97.5 % quantile of the normal distribution; t: of Student's with G − 1 degrees of freedom,
for v is an estimate. Where the design effect cannot be estimated (one problem, or p of 0 or 1) n_eff is its least
value, G for problems of equal size. Sources: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953; design effect
and (z/t)²: Korn & Graubard 1998, Survey Methodology 24(2); Wilson with n_eff: Franco et al. 2019,
https://doi.org/10.1093/jssam/smy019. docs/how-to/evaluate.md explains them to users.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Z = statistics.NormalDist().inv_cdf(0.975)
Values = Mapping[str, Sequence[float]]  # problem → the values of its samples in [0, 1], at least one each


class Interval(NamedTuple):
    """A mean with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        """``0.500 [0.401, 0.599]`` for the format ``.3f``."""
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """The chance that at least one of k samples, drawn without replacement from ``samples``, is a success; unbiased.

    1 − C(n−c, k) / C(n, k)   (https://arxiv.org/abs/2107.03374, eq. 1), in exact integers
    """
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def success_interval(values: Values) -> Interval:
    """The mean over all samples, with the Wilson interval that treats the samples of a problem as one cluster.

        0 of 4 problems  ─▶  0 … z²/(4 + z²) = 0.490        4 of 4  ─▶  0.510 … 1        1 of 1  ─▶  0.207 … 1

    Every sum is exact before it is rounded, so the result does not depend on the order of problems and samples.
    """
    sizes = [len(of_problem) for of_problem in values.values()]
    samples, clusters = sum(sizes), len(sizes)
    mean = math.fsum(value for of_problem in values.values() for value in of_problem) / samples
    square = math.fsum(math.fsum(value - mean for value in of_problem) ** 2 for of_problem in values.values())
    variance = clusters / max(clusters - 1, 1) * square / samples**2
    fewest = samples**2 / sum(size**2 for size in sizes)
    return Interval(mean, *_wilson(mean, variance, clusters=clusters, fewest=fewest, samples=samples))


def paired_difference(ours: Values, theirs: Values) -> Interval:
    """``ours`` minus ``theirs``, paired by problem, so that the difficulty of a problem cancels out.

        d_g = mean of ours_g − mean of theirs_g;    b = mean_g max(d_g, 0);    c = mean_g max(−d_g, 0)
        b − c, each problem counted once
        low  = b − c − √((b − l_b)² + (u_c − c)² − 2φ(b − l_b)(u_c − c))       l, u: Wilson bounds as above
        high = b − c + √((u_b − b)² + (c − l_c)² − 2φ(u_b − b)(c − l_c))       φ: correlation of the two parts, <= 0

    Square-and-add limits of a paired difference (Newcombe 1998, https://doi.org/10.1002/(SICI)1097-0258(19981130)17:22%3C
    2635::AID-SIM954%3E3.0.CO;2-C): they keep a width where the two sides agree on every problem.
    """
    pairs = sum(min(len(ours[problem]), len(theirs[problem])) for problem in ours)
    differences = [statistics.fmean(ours[problem]) - statistics.fmean(theirs[problem]) for problem in ours]
    better, worse = [max(each, 0.0) for each in differences], [max(-each, 0.0) for each in differences]
    b, b_low, b_high = _mean_of_problems(better, samples=pairs)
    c, c_low, c_high = _mean_of_problems(worse, samples=pairs)
    spread = statistics.pstdev(better) * statistics.pstdev(worse)
    correlation = max(-b * c / spread, -1.0) if spread else 0.0  # no problem is in both parts
    low = b - c - _added(b - b_low, c_high - c, correlation)
    high = b - c + _added(b_high - b, c - c_low, correlation)
    return Interval(b - c, max(low, -1.0), min(high, 1.0))


def _mean_of_problems(values: Sequence[float], *, samples: int) -> Interval:
    """The mean of one number for each problem, which stands for some of ``samples`` samples."""
    mean, clusters = math.fsum(values) / len(values), len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (max(clusters - 1, 1) * clusters)
    return Interval(mean, *_wilson(mean, variance, clusters=clusters, fewest=clusters, samples=samples))


def _wilson(mean: float, variance: float, *, clusters: int, fewest: float, samples: int) -> tuple[float, float]:
    """Wilson's bounds for the effective number of samples, from ``fewest`` to ``samples``."""
    spread = mean * (1 - mean)
    n_eff = float(fewest)
    if clusters > 1 and spread > 0:
        from scipy.special import stdtrit

        t = float(stdtrit(clusters - 1, 0.975))
        n_eff_times_variance = spread * (Z / t) ** 2 * samples / (samples - 1)
        n_eff = min(max(n_eff_times_variance / variance, fewest), samples) if variance else float(samples)
    centre = mean + Z**2 / (2 * n_eff)
    reach = Z * math.sqrt(spread / n_eff + (Z / (2 * n_eff)) ** 2)
    low, high = (centre - reach) / (1 + Z**2 / n_eff), (centre + reach) / (1 + Z**2 / n_eff)
    return min(max(low, 0.0), mean), max(min(high, 1.0), mean)


def _added(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(one**2 + other**2 - 2 * correlation * one * other, 0.0))
