"""Bootstrap intervals over seeds and problems, on matrices whose aggregates are known."""

import numpy as np
import pytest

from condensegrpo.metrics.resampling import (
    difference_interval,
    interquartile_mean,
    mean_interval,
    probability_of_improvement,
)


def seeds(*means: float, problems: int = 100) -> np.ndarray:  # type: ignore[type-arg]
    """One row a seed, with this share of successes; the same problems are hard for all."""
    return np.array([[float(at < mean * problems) for at in range(problems)] for mean in means])


def test_the_interquartile_mean_leaves_out_the_lowest_and_the_highest_quarter_of_the_seeds() -> None:
    value = interquartile_mean(seeds(0.1, 0.8, 0.8, 0.9, 1.0))
    assert value.mean == pytest.approx((0.8 + 0.8 + 0.9) / 3)
    assert value.low < value.mean < value.high


def test_a_proportion_of_one_or_zero_has_the_interval_of_wilson_and_not_a_width_of_nothing() -> None:
    # 128 problems, all solved by 5 seeds: z²/(128 + z²) = 3.8415/131.8415 = 0.0291
    assert mean_interval(np.ones((5, 128))).low == pytest.approx(1 - 0.0291, abs=1e-4)
    assert mean_interval(np.zeros((5, 128))).high == pytest.approx(0.0291, abs=1e-4)
    assert interquartile_mean(np.ones((5, 128))).high == 1.0


def test_an_interval_grows_with_the_differences_between_seeds() -> None:
    alike, apart = mean_interval(seeds(0.5, 0.5, 0.5, 0.5)), mean_interval(seeds(0.2, 0.8, 0.2, 0.8))
    assert alike.mean == apart.mean == 0.5
    assert apart.high - apart.low > 1.5 * (alike.high - alike.low)


def test_the_difficulty_of_problems_cancels_out_of_a_difference() -> None:
    ours, theirs = seeds(0.6, 0.6, 0.6), seeds(0.5, 0.5, 0.5)
    value = difference_interval(ours, theirs)
    assert value.mean == pytest.approx(0.1)
    assert 0 < value.low < 0.1 < value.high < 0.2  # each mean by itself has an interval of ± 0.1


def test_the_probability_of_improvement_counts_pairs_of_seeds_and_equal_ones_half() -> None:
    # 0.6 > 0.5 and 0.6 > 0.4; 0.5 = 0.5 and 0.5 > 0.4
    assert probability_of_improvement(seeds(0.6, 0.5), seeds(0.5, 0.4)).mean == pytest.approx(3.5 / 4)
    certain = probability_of_improvement(np.ones((5, 10)), np.zeros((5, 10)))
    assert (certain.mean, certain.high) == (1.0, 1.0)
    assert certain.low == pytest.approx(5 / (5 + 1.959964**2))  # Wilson, 5 of 5


def test_one_seed_has_the_interval_of_its_problems() -> None:
    value = mean_interval(seeds(0.9))
    assert value.low == pytest.approx(0.826, abs=2e-3)  # Wilson, 90 of 100
    tokens = mean_interval(seeds(0.5) * 20 + 20, share=False)
    assert tokens.mean == 30
    assert 26 < tokens.low < 30 < tokens.high < 34


def test_the_same_runs_have_the_same_interval_every_time() -> None:
    assert mean_interval(seeds(0.5, 0.7)) == mean_interval(seeds(0.5, 0.7))
