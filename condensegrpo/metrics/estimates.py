"""Estimates: what some samples say about a policy, and how surely. Pure functions, standard library only."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """A mean with its 95 % confidence interval; the bounds are None where the data cannot tell."""

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

    Samples of one problem resemble each other: taken for independent they would make the interval too narrow (the
    cluster-robust variance of https://arxiv.org/abs/2411.00640, with the factor for few clusters). One problem alone
    says nothing about others: its bounds are None. Where all clusters agree the interval has no width. Every sum is
    exact before it is rounded, so that the order of the samples changes not one bit.

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
