"""What samples say about a policy, against counts made by hand and by brute force."""

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.metrics.intervals import paired_difference, pass_at_k, success_interval


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


RATES = st.dictionaries(
    st.integers(0, 99).map(str), st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=3), min_size=1
)


def problems(*samples: list[float]) -> dict[str, list[float]]:
    return {str(number): own for number, own in enumerate(samples)}


# By hand, of n effective samples: p of 0 gives 0 … z²/(n + z²), p of ½ gives ½ ± z/(2·√(n + z²)); z² = 3.8415
@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        (problems([0], [0], [0], [0]), 0.0, 0.4899),  # n = 4
        (problems([1], [1], [1], [1]), 0.5101, 1.0),
        (problems([0, 0], [0, 0], [0, 0], [0, 0]), 0.0, 0.4899),  # samples of a problem may all be alike: n = 4 still
        (problems([1] * 8), 0.2065, 1.0),  # one problem, n = 1
        (problems([1, 0]), 0.0546, 0.9454),
        (problems(*[[1]] * 5, *[[0]] * 5), 0.2366, 0.7634),  # n = 10, one sample each
        (problems([1, 1], [0, 0]), 0.0945, 0.9055),  # samples agree within problems: n = 2 of 4
        (problems([1, 0], [1, 0]), 0.1500, 0.8500),  # problems do not differ: n = 4 of 4
        # v = 100/99·80/200² = 0.00202, n = ¼/v · 200/199 · (1.9600/1.9842)² = 121.3
        (problems(*[[1, 1]] * 40, *[[1, 0]] * 20, *[[0, 0]] * 40), 0.4124, 0.5876),
    ],
)
def test_the_interval_by_hand(values: dict[str, list[float]], low: float, high: float) -> None:
    found = success_interval(values)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert found.mean == sum(sum(own) for own in values.values()) / sum(map(len, values.values()))


def test_samples_that_copy_each_other_add_nothing() -> None:
    once = problems([1], [0], [0], [1])
    assert success_interval({name: own * 8 for name, own in once.items()}) == pytest.approx(success_interval(once))


@pytest.mark.parametrize(("successes", "samples"), [(0.02, 4), (0.5, 4), (0.97, 4), (0.5, 1)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(successes: float, samples: int) -> None:
    """Evaluations of 16 problems whose success rates differ; the t interval holds 2 % in a third of them."""
    draw = random.Random(5)
    covered = 0
    for _ in range(400):
        rates = [draw.betavariate(successes, 1 - successes) for _ in range(16)]
        values = problems(*([float(draw.random() < rate) for _ in range(samples)] for rate in rates))
        found = success_interval(values)
        covered += found.low <= successes <= found.high
    assert covered / 400 > 0.9


@settings(max_examples=50)
@given(values=RATES, draw=st.randoms(use_true_random=False))
def test_bounds_hold_the_mean_have_a_width_and_do_not_depend_on_the_order(
    values: dict[str, list[float]], draw: random.Random
) -> None:
    # ranks hand in their shares one after the other: an evaluation on two ranks must say what one says
    found = success_interval(values)
    assert 0 <= found.low <= found.mean <= found.high <= 1
    assert found.high - found.low > 0.001
    mixed = draw.sample(list(values.items()), len(values))
    assert success_interval({name: draw.sample(own, len(own)) for name, own in mixed}) == found


def test_a_difference_by_hand() -> None:
    # b = ½ of 4 with bounds 0.1500 … 0.8500, c = 0 with 0 … 0.4899:  ½ − √(0.35² + 0.4899²), ½ + √(0.35² + 0²)
    found = paired_difference(problems([1], [1], [1], [0]), problems([0], [0], [1], [0]))
    assert found == pytest.approx((0.5, -0.1021, 0.85), abs=1e-4)


def test_sides_that_agree_on_every_problem_may_differ_on_others() -> None:
    both = problems([1], [1], [1], [1])
    assert paired_difference(both, both) == pytest.approx((0, -0.4899, 0.4899), abs=1e-4)


def test_a_difference_is_paired_by_problem_and_counts_each_once() -> None:
    """Half of the problems are hard for both sides, which says nothing of their difference."""
    theirs = problems(*[[1, 1]] * 50, *[[0, 0]] * 50)
    ours = {**theirs, "99": [1, 1]}
    found = paired_difference(ours, theirs)
    assert found.mean == 0.01
    assert found.high - found.low < 0.1 < 2 * (success_interval(ours).mean - success_interval(ours).low)
    assert paired_difference({"a": [1, 1, 1], "b": [0]}, {"a": [0], "b": [0]}).mean == 0.5


def test_a_difference_holds_the_truth_about_as_often_as_it_says() -> None:
    """Small differences: resampling problems, as before, holds 0.05 in a quarter of the cases."""
    draw = random.Random(3)
    covered = 0
    for _ in range(400):
        rates = [draw.betavariate(0.95, 0.05) for _ in range(8)]
        theirs = problems(*([float(draw.random() < rate * 0.95)] for rate in rates))
        ours = problems(*([float(draw.random() < rate)] for rate in rates))
        found = paired_difference(ours, theirs)
        covered += found.low <= 0.05 * 0.95 <= found.high
    assert covered / 400 > 0.93


@given(ours=RATES)
@settings(max_examples=30)
def test_a_difference_to_oneself_is_nothing(ours: dict[str, list[float]]) -> None:
    found = paired_difference(ours, ours)
    assert found.mean == 0
    assert -1 <= found.low == -found.high < 0
