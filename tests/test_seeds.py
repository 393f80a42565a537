"""Figures of studies: intervals over seeds and problems, by hand and by simulation."""

import numpy as np
import pytest

from condensegrpo.studies.lab.intervals import (
    difference_interval,
    interquartile_mean,
    mean_interval,
    new_seed_interval,
    probability_of_improvement,
)


def seeds(*means: float, problems: int = 100) -> np.ndarray:  # type: ignore[type-arg]  # of floats
    """One row a seed, with this share of successes; the same problems are hard for all."""
    return np.array([[float(at < mean * problems) for at in range(problems)] for mean in means])


def column(*means: float) -> np.ndarray:  # type: ignore[type-arg]  # of floats
    """One row a seed and one column: the problems do not vary."""
    return np.array([[mean] for mean in means])


def test_the_interquartile_mean_leaves_out_the_lowest_and_the_highest_quarter_of_the_seeds() -> None:
    assert interquartile_mean(seeds(0.1, 0.8, 0.8, 0.9, 1.0)) == pytest.approx((0.8 + 0.8 + 0.9) / 3)


def test_the_intervals_over_seeds_by_hand() -> None:
    # 0.6 0.7 0.8: v = 0.01, t of 2 degrees of freedom 4.3027; ± 4.3027·√(0.01/3), and ± 4.3027·√(0.01·4/3)
    assert mean_interval(column(0.6, 0.7, 0.8), share=False) == pytest.approx((0.7, 0.4516, 0.9484), abs=1e-4)
    assert new_seed_interval(column(0.6, 0.7, 0.8)) == pytest.approx((0.7, 0.2032, 1.0), abs=1e-4)  # at most 1
    assert new_seed_interval(column(0.7)) is None
    assert new_seed_interval(column(0.7, 0.7)) is None


def test_seeds_that_share_a_warm_start_are_compared_in_pairs() -> None:
    # differences 0.1 0.2 0.3: ± 4.3027·√(0.01/3)
    ours, theirs = column(0.3, 0.6, 0.9), column(0.2, 0.4, 0.6)
    paired = difference_interval(ours, theirs, paired=True)
    assert paired == pytest.approx((0.2, -0.0484, 0.4484), abs=1e-4)
    # V = 0.09/3 + 0.04/3 = 0.043333, ν = 0.043333²/(0.03²/2 + 0.013333²/2) = 3.485, t = 2.945
    welch = difference_interval(ours, theirs, paired=False)
    assert welch == pytest.approx((0.2, -0.4131, 0.8131), abs=2e-3)


def test_seeds_and_problems_are_both_samples() -> None:
    # cells 0 1 / 1 1: rows 0.5 1, columns 0.5 1, residual −0.25 0.25 / 0.25 −0.25 with one degree of freedom
    # V = 0.125/2 + 0.125/2 − 0.25/4 = 0.0625 = each of its three parts up to sign, ν = 1/3
    value = mean_interval(np.array([[0.0, 1.0], [1.0, 1.0]]))
    assert value == (0.75, 0.0, 1.0)
    varied = mean_interval(seeds(0.5, 0.5, 0.5))  # of the problems alone: ± 1.984·√(0.25/99)
    assert varied == pytest.approx((0.5, 0.4003, 0.5997), abs=2e-4)


def test_a_proportion_of_one_or_zero_has_the_interval_of_wilson_and_not_a_width_of_nothing() -> None:
    # 128 problems, all solved by 5 seeds: z²/(128 + z²) = 3.8415/131.8415 = 0.0291
    assert mean_interval(np.ones((5, 128))).low == pytest.approx(1 - 0.0291, abs=1e-4)
    assert mean_interval(np.zeros((5, 128))).high == pytest.approx(0.0291, abs=1e-4)
    equal = difference_interval(np.ones((5, 128)), np.ones((5, 128)), paired=True)
    assert equal.high == -equal.low == pytest.approx(0.0291, abs=1e-4)


def test_an_interval_grows_with_the_differences_between_seeds() -> None:
    alike, apart = mean_interval(seeds(0.5, 0.5, 0.5, 0.5)), mean_interval(seeds(0.2, 0.8, 0.2, 0.8))
    assert alike.mean == apart.mean == 0.5
    assert apart.high - apart.low > 1.5 * (alike.high - alike.low)


@pytest.mark.parametrize("paired", [True, False])
def test_the_difficulty_of_problems_cancels_out_of_a_difference(paired: bool) -> None:
    ours, theirs = seeds(0.6, 0.6, 0.6), seeds(0.5, 0.5, 0.5)
    value = difference_interval(ours, theirs, paired=paired)
    assert value.mean == pytest.approx(0.1)
    assert 0 < value.low < 0.1 < value.high < 0.2  # each mean by itself has an interval of ± 0.1


def test_the_probability_of_improvement_counts_pairs_of_seeds_and_equal_ones_half() -> None:
    # 0.6 > 0.5 and 0.6 > 0.4; 0.5 = 0.5 and 0.5 > 0.4
    assert probability_of_improvement(seeds(0.6, 0.5), seeds(0.5, 0.4)) == pytest.approx(3.5 / 4)


def test_one_seed_has_the_interval_of_its_problems() -> None:
    value = mean_interval(seeds(0.9))
    assert value.low == pytest.approx(0.826, abs=2e-3)  # Wilson, 90 of 100
    tokens = mean_interval(seeds(0.5) * 20 + 20, share=False)
    assert tokens.mean == 30
    assert 26 < tokens.low < 30 < tokens.high < 34


def test_other_problems_are_no_comparison() -> None:
    with pytest.raises(ValueError, match="found 3 and 2 problems"):
        difference_interval(np.ones((2, 3)), np.ones((2, 2)), paired=True)
