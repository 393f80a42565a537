"""Intervals by resampling whole problems, and differences paired by problem."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.metrics.estimates import bootstrap_interval, mean_interval_by_problem, paired_difference

RATES = st.dictionaries(st.integers(0, 99).map(str), st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=3))


def test_the_mean_counts_samples_and_the_interval_resamples_problems() -> None:
    """Two problems, (1, 1) and (0): the means of resamples are 1, 2/3 and 0, with chances 1/4, 1/2 and 1/4."""
    found = bootstrap_interval({"a": [1, 1], "b": [0]})
    assert found.mean == pytest.approx(2 / 3)
    assert (found.low, found.high) == (0.0, 1.0)


def test_one_problem_says_nothing_of_others() -> None:
    assert bootstrap_interval({"a": [1.0, 0.0]}) == (0.5, None, None)


def test_where_all_problems_agree_the_interval_has_no_width() -> None:
    assert bootstrap_interval({"a": [1.0], "b": [1.0, 1.0]}) == (1.0, 1.0, 1.0)


def test_copies_of_a_sample_do_not_narrow_the_interval() -> None:
    once = {str(problem): [float(problem % 2)] for problem in range(40)}
    often = {problem: found * 8 for problem, found in once.items()}
    assert bootstrap_interval(often) == bootstrap_interval(once)


def test_it_agrees_with_the_interval_by_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    values = {str(p): torch.rand(3, generator=generator).tolist() for p in range(200)}
    flat = [(value, problem) for problem, found in values.items() for value in found]
    exact = mean_interval_by_problem([value for value, _ in flat], [problem for _, problem in flat])
    found = bootstrap_interval(values)
    assert found.low == pytest.approx(exact.low, abs=0.004)
    assert found.high == pytest.approx(exact.high, abs=0.004)


@given(values=RATES.filter(bool))
@settings(max_examples=60, deadline=None)
def test_the_order_given_does_not_matter_and_the_bounds_hold_the_mean(values: dict[str, list[float]]) -> None:
    found = bootstrap_interval(values, resamples=2000)
    assert bootstrap_interval(dict(reversed(values.items())), resamples=2000) == found
    if found.low is not None and found.high is not None and len(values) > 4:
        assert -1e-9 <= found.low <= found.mean + 1e-9
        assert found.mean - 1e-9 <= found.high <= 1 + 1e-9


def test_a_difference_is_paired_by_problem() -> None:
    """Problems differ much and the two sides by 0.1 in each: paired, the difference is known exactly."""
    theirs = {str(problem): [problem / 100] for problem in range(60)}
    ours = {problem: [found[0] + 0.1] for problem, found in theirs.items()}
    found = paired_difference(ours, theirs)
    assert found.mean == pytest.approx(0.1)
    assert found.low == pytest.approx(0.1)
    assert found.high == pytest.approx(0.1)


def test_a_difference_counts_each_problem_once() -> None:
    found = paired_difference({"a": [1.0, 1.0, 1.0], "b": [0.0]}, {"a": [0.0], "b": [0.0]})
    assert found.mean == 0.5


@given(ours=RATES.filter(bool))
@settings(max_examples=30, deadline=None)
def test_a_difference_to_oneself_is_nothing(ours: dict[str, list[float]]) -> None:
    found = paired_difference(ours, ours, resamples=500)
    assert found.mean == 0
    assert found.low in (0, None)


def test_a_difference_of_other_problems_is_refused() -> None:
    with pytest.raises(ValueError, match="2 problems are on one side only"):
        paired_difference({"a": [1.0], "b": [1.0]}, {"b": [1.0], "c": [1.0]})


@pytest.mark.parametrize("values", [{}, {"a": []}])
def test_no_sample_is_refused(values: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        bootstrap_interval(values)
