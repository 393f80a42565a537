"""What samples say about a policy, against counts made by hand and by brute force."""

import math
import random
import statistics
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.metrics.estimates import Interval, mean_interval_by_problem, pass_at_k


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_success(samples: int) -> None:
    for successes in range(samples + 1):
        for k in range(1, samples + 1):
            subsets = list(combinations([1] * successes + [0] * (samples - successes), k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(successes, samples, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_one_is_the_success_rate_and_pass_at_all_is_certain() -> None:
    assert pass_at_k(3, 8, 1) == 3 / 8
    assert pass_at_k(1, 8, 8) == 1
    assert pass_at_k(0, 8, 8) == 0


def test_pass_at_k_of_many_samples_stays_exact() -> None:
    assert pass_at_k(1, 10_000, 5_000) == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize(("successes", "samples", "k"), [(2, 1, 1), (-1, 4, 1), (1, 4, 5), (1, 4, 0), (0, 0, 1)])
def test_pass_at_k_refuses_counts_that_cannot_be(successes: int, samples: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"pass@k needs"):
        pass_at_k(successes, samples, k)


def test_one_sample_a_problem_gives_the_ordinary_t_interval() -> None:
    values = [1.0, 2.0, 4.0, 5.0]  # mean 3, standard deviation √(10/3), t with 3 degrees of freedom 3.182
    mean, low, high = mean_interval_by_problem(values, ["a", "b", "c", "d"])
    reach = 3.182 * math.sqrt(10 / 3) / 2
    assert mean == 3
    assert (low, high) == pytest.approx((3 - reach, 3 + reach), abs=5e-3)


def test_copies_of_a_sample_add_nothing_to_what_is_known() -> None:
    once = mean_interval_by_problem([1, 0, 0, 1], ["a", "b", "c", "d"])
    eight_times = mean_interval_by_problem([1, 0, 0, 1] * 8, ["a", "b", "c", "d"] * 8)
    assert eight_times == pytest.approx(once)


def test_samples_that_differ_within_problems_but_not_between_them_leave_no_doubt() -> None:
    assert mean_interval_by_problem([1, 0, 1, 0], ["a", "a", "b", "b"]) == Interval(0.5, 0.5, 0.5)


def test_problems_of_different_size_weigh_by_their_samples() -> None:
    # mean ¾; residual sums: a 3·¼ = ¾, b −¾; se² = 2/1 · (2·9/16)/16; t with one degree of freedom 12.706
    mean, low, high = mean_interval_by_problem([1, 1, 1, 0], ["a", "a", "a", "b"])
    reach = 12.7062 * math.sqrt(2 * (9 / 8) / 16)
    assert mean == 0.75
    assert (low, high) == pytest.approx((0.75 - reach, 0.75 + reach), rel=1e-5)


def test_one_problem_has_a_mean_and_no_bounds() -> None:
    assert mean_interval_by_problem([1, 0, 1, 1], ["a"] * 4) == Interval(0.75, None, None)


def test_many_problems_approach_the_normal_quantile() -> None:
    values = [float(index % 2) for index in range(1000)]
    _, low, high = mean_interval_by_problem(values, [str(index) for index in range(1000)])
    assert low is not None
    assert high is not None
    assert (high - low) / 2 == pytest.approx(1.9623 * statistics.stdev(values) / math.sqrt(1000), rel=1e-4)


@pytest.mark.parametrize(
    ("problems", "quantile"), [(2, 12.7062), (3, 4.3027), (4, 3.1824), (6, 2.5706), (11, 2.2281), (31, 2.0423)]
)
def test_few_problems_widen_the_interval_by_students_t(problems: int, quantile: float) -> None:
    values = [float(index) for index in range(problems)]
    mean, low, _ = mean_interval_by_problem(values, [str(index) for index in range(problems)])
    assert low is not None
    assert (mean - low) / (statistics.stdev(values) / math.sqrt(problems)) == pytest.approx(quantile, rel=2e-3)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    # 400 evaluations of 20 problems × 4 samples whose success rates differ; taken for independent, far fewer would do
    draw = random.Random(5)
    covered = 0
    for _ in range(400):
        rates = [draw.choice([0.1, 0.9]) for _ in range(20)]
        values = [float(draw.random() < rate) for rate in rates for _ in range(4)]
        _, low, high = mean_interval_by_problem(values, [str(index // 4) for index in range(80)])
        assert low is not None
        assert high is not None
        covered += low <= 0.5 <= high
    assert 0.92 < covered / 400 < 0.98


def test_no_values_have_no_mean() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval_by_problem([], [])


def test_every_value_needs_its_problem() -> None:
    with pytest.raises(ValueError, match="zip"):
        mean_interval_by_problem([1, 0], ["a"])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-10, 10), st.sampled_from("abcd")), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_the_order_of_the_samples_changes_not_one_bit(samples: list[tuple[float, str]], draw: random.Random) -> None:
    # ranks hand in their shares one after the other: an evaluation on two ranks must say what one says
    mixed = draw.sample(samples, len(samples))
    whole, shuffled = (mean_interval_by_problem(*map(list, zip(*some, strict=True))) for some in (samples, mixed))
    assert whole == shuffled
