"""Rank correlation and its interval. Pure functions; standard library only."""

import random
from collections.abc import Mapping, Sequence
from statistics import fmean


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Pearson's correlation of the ranks, equal values sharing the mean of theirs; None where one side is all equal.

    1 2 3 and 10 30 20 ─▶ ranks 1 2 3 and 1 3 2 ─▶ 0.5
    """
    a, b = ranked(left), ranked(right)
    mean_a, mean_b = fmean(a), fmean(b)
    spread = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    if not spread:
        return None
    return float(sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True)) / spread**0.5)


def ranked(values: Sequence[float]) -> list[float]:
    """The rank of each value from 1 on; equal values share the mean: 5 7 5 ─▶ 1.5 3 1.5."""
    order = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(order, 1)))}
    return [first[value] + (order.count(value) - 1) / 2 for value in values]


def interval(by_problem: Mapping[str, Sequence[float]], *, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean, problems drawn whole."""
    stream = random.Random(seed)
    problems = list(by_problem.values())
    means = sorted(
        fmean([value for problem in stream.choices(problems, k=len(problems)) for value in problem])
        for _ in range(draws)
    )
    return means[round(0.025 * draws)], means[round(0.975 * draws) - 1]
