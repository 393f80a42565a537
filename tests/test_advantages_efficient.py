"""The estimator ``efficient``: correctness first, then context among the correct."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from estimating import estimate, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from condensegrpo.algorithms.advantages import Batch
from condensegrpo.algorithms.outcome_estimators import efficient
from condensegrpo.core.errors import ScoreError

ROOT_HALF = math.sqrt(0.5)


def run_efficient(
    outcomes: list[float], contexts: Sequence[float], groups: list[int] | None = None, **options: object
) -> Tensor:
    """One column of ``efficient``, anchors 100 and 1000 tokens, accuracy unscaled unless asked for."""
    outcome_N = torch.tensor(outcomes, dtype=torch.float64)
    one_N = torch.ones(len(outcomes), dtype=torch.int64)
    nothing_N = torch.zeros_like(outcome_N)
    settings_used = {"context_low": 100, "context_high": 1000, "accuracy": "none", "truncated_N": one_N < 0}
    settings_used |= {"uncached_N": nothing_N, "cached_N": nothing_N, "output_N": nothing_N} | options
    group_N = torch.tensor(groups) if groups else one_N
    context_N = torch.tensor(contexts, dtype=torch.float64)
    batch = Batch(outcome_N, torch.zeros_like(outcome_N), group_N, one_N, -one_N)
    return efficient(batch, context_N=context_N, **settings_used).advantage_NK.flatten()


def test_efficient_rewards_the_shorter_of_two_correct_contexts() -> None:
    # u = 0 and 1, mean ½, std √½, so E = ±√½; p = ½, λ = 0.2
    found = run_efficient([1, 1, 0, 0], [100, 1000, 100, 100])
    assert same(found, [0.5 + 0.1 * ROOT_HALF, 0.5 - 0.1 * ROOT_HALF, -0.5, -0.5])


def test_efficient_by_price_counts_what_all_calls_read_and_write() -> None:
    # first: 60 uncached + 0.1 · 200 cached + 4 · 5 written = 100; second: 600 + 0.1 · 0 + 4 · 100 = 1000; u = 0 and 1
    columns = {"uncached_N": [60.0, 600.0], "cached_N": [200.0, 0.0], "output_N": [5.0, 100.0]}
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    assert same(run_efficient([1, 1], [500, 100], cost="price", **tensors), [0.2 * ROOT_HALF, -0.2 * ROOT_HALF])
    # the weights are settable: 60 + 1 · 200 + 8 · 5 = 300 and 600 + 8 · 100 = 1400, cut to 1000
    found = run_efficient([1, 1], [500, 100], cost="price", cached=1.0, written=8.0, **tensors)
    u = math.log10(3)
    assert same(found, [0.2 * min(1, (1 - u) / 2 / ((1 - u) * ROOT_HALF)), -0.2 * ROOT_HALF])


def test_efficient_measures_context_by_its_logarithm() -> None:
    # 316.23 = 100·√10 lies half-way; u = 0, ½, 1: mean ½, std ½; E = 1, 0, −1; all correct, so A_acc = 0 and p = 1
    assert same(run_efficient([1, 1, 1], [100, 316, 1000]), [0.2, 0.0, -0.2], atol=1e-3)


def test_contexts_beyond_the_anchors_count_as_the_anchors_and_none_as_cheapest() -> None:
    assert run_efficient([1, 1], [0, 5000]).tolist() == run_efficient([1, 1], [100, 1000]).tolist()


def test_nearly_equal_contexts_are_not_blown_up_by_a_tiny_deviation() -> None:
    # u differs by 0.02 about its mean: the deviation 0.014 is taken as 0.1, so E = ±0.01/0.1
    near = round(100 * 10**0.02)  # 105
    u = math.log10(near / 100)
    assert same(run_efficient([1, 1], [100, near]), [0.2 * u / 0.2, -0.2 * u / 0.2])


def test_the_context_term_is_clipped_to_one_deviation() -> None:
    # u = 0, 0, 0, 1: mean ¼, std ½; E = ½, ½, ½ and −1.5, clipped to −1
    assert same(run_efficient([1, 1, 1, 1], [100, 100, 100, 1000]), [0.1, 0.1, 0.1, -0.2])


def test_the_context_term_counts_by_the_pass_rate_and_not_below_its_threshold() -> None:
    outcomes, contexts = [1, 1, 0, 0], [100, 1000, 100, 100]
    assert same(run_efficient(outcomes, contexts, min_pass_rate=0.6), [0.5, 0.5, -0.5, -0.5])
    assert run_efficient(outcomes, contexts, min_pass_rate=0.5).tolist() == run_efficient(outcomes, contexts).tolist()


def test_a_single_correct_trajectory_earns_no_context_term() -> None:
    assert same(run_efficient([1, 0], [1000, 100]), [0.5, -0.5])


def test_a_wrong_trajectory_earns_nothing_for_a_short_context() -> None:
    assert same(run_efficient([1, 1, 0.9, 0], [500, 500, 1, 1]), [0.275, 0.275, 0.175, -0.725])


def test_the_guard_keeps_a_long_but_correct_trajectory_positive() -> None:
    # A_acc of a correct one is 1/8; E of the last correct is −1, so unguarded it had 0.125 − 2·0.875 < 0
    outcomes, contexts = [1, 1, 1, 1, 1, 1, 1, 0], [100, 100, 100, 100, 100, 100, 1000, 100]
    found = run_efficient(outcomes, contexts, coefficient=2.0)
    assert float(found[6]) == pytest.approx(0.25 * 0.125)
    assert float(found[7]) == pytest.approx(-0.875)


def test_in_an_all_correct_group_the_guard_does_not_bite() -> None:
    assert same(run_efficient([1, 1], [100, 1000], guard=1.0), [0.2 * ROOT_HALF, -0.2 * ROOT_HALF])


def test_no_correct_trajectory_at_a_high_pass_rate_is_punished_for_its_length() -> None:
    # the fault of 1/C with std scaling: at pass rate 0.97 almost half of the correct get a negative advantage
    contexts = [100 + 29 * place for place in range(32)]
    found = run_efficient([1.0] * 31 + [0.0], contexts, accuracy="std")
    assert (found[:31] > 0).all()
    assert found[31] < 0


def test_a_truncated_trajectory_earns_no_context_term() -> None:
    truncated_N = torch.tensor([True, False])
    assert same(run_efficient([1, 1], [100, 1000], truncated_N=truncated_N), [0.0, -0.2 * ROOT_HALF])


def test_accuracy_may_be_scaled_by_its_deviation() -> None:
    # std of [1, 1, 0, 0] with ddof 1 is √⅓; no difference in context
    found = run_efficient([1, 1, 0, 0], [100, 100, 100, 100], accuracy="std")
    assert same(found, [0.8660254, 0.8660254, -0.8660254, -0.8660254])


def test_groups_are_compared_within_themselves_only() -> None:
    found = run_efficient([1, 1, 1, 1], [100, 1000, 500, 500], groups=[4, 9, 4, 9])
    alone = run_efficient([1, 1], [100, 500])
    assert torch.allclose(found[[0, 2]], alone)
    assert torch.allclose(found[[1, 3]], run_efficient([1, 1], [1000, 500]))


def test_a_group_without_any_correct_trajectory_has_no_signal() -> None:
    assert run_efficient([0, 0, 0], [100, 500, 1000], accuracy="std").tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [1.5, -0.1])
def test_an_outcome_that_is_no_score_is_refused(value: float) -> None:
    with pytest.raises(ScoreError, match=rf"trajectory 1 .*is {value}.*algorithm.advantage.estimator=grpo"):
        run_efficient([1, value], [100, 100])


@pytest.mark.parametrize(("low", "high"), [(0, 100), (100, 100), (200, 100)])
def test_context_anchors_must_rise(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="0 < context_low < context_high"):
        run_efficient([1, 1], [100, 100], context_low=low, context_high=high)


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 4000), st.integers(0, 2)), min_size=1, max_size=12
    )
)
def test_efficient_keeps_its_promises(rows: list[tuple[float, int, int]]) -> None:
    outcomes, contexts, groups = (list(column) for column in zip(*rows, strict=True))
    found = run_efficient(outcomes, contexts, groups, accuracy="std")
    accuracy = estimate("grpo", outcomes, groups=groups).flatten()
    assert found.isfinite().all()
    for place, outcome in enumerate(outcomes):
        if outcome < 1:
            assert found[place] == accuracy[place]
        if accuracy[place] > 0:
            assert found[place] >= 0.25 * accuracy[place] - 1e-12
        assert abs(found[place] - accuracy[place]) <= 0.2 + 1e-12


def test_correct_siblings_with_and_without_scaling_by_hand() -> None:
    # r = [1, 1, 0]: r − ⅔ = ⅓, ⅓, −⅔, std 1/√3, so A_acc = 1/√3, 1/√3, −2/√3; two turns, one, none
    # u = 0, 1: E = ±√½; p = ⅔: λ·p·E = ±0.3·⅔·√½ = ±0.2·√½
    found = estimate("efficient", [1, 1, 0], turns=[2, 1, 0], contexts=[100, 1000, 100], coefficient=0.3, eps=0)
    root3 = math.sqrt(3)
    assert same(found, [[1 / root3 + 0.2 * ROOT_HALF] * 2, [1 / root3 - 0.2 * ROOT_HALF, 0], [0, 0]], atol=1e-12)


CORRECTNESS = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0]), st.integers(0, 4000), st.integers(0, 2)), min_size=1, max_size=12
)
Rows = list[tuple[float, int, int]]


@settings(max_examples=20)
@given(CORRECTNESS, st.sampled_from([0.0, 0.2, 5.0]), st.sampled_from([0.0, 0.25]), st.sampled_from(["std", "none"]))
def test_no_correct_trajectory_is_negative_in_a_mixed_group_or_below_a_wrong_one(
    rows: Rows, coefficient: float, guard: float, accuracy: str
) -> None:
    outcomes, contexts, groups = (list(column) for column in zip(*rows, strict=True))
    found = run_efficient(outcomes, contexts, groups, coefficient=coefficient, guard=guard, accuracy=accuracy)
    for group in set(groups):
        members = [place for place, one in enumerate(groups) if one == group]
        correct = [float(found[place]) for place in members if outcomes[place] == 1]
        wrong = [float(found[place]) for place in members if outcomes[place] == 0]
        if correct and wrong:
            assert min(correct) >= 0 > max(wrong)


def test_beside_partial_credit_a_long_correct_trajectory_may_fall_below_it() -> None:
    """The limit of the promise above, as the docstring states it.

    mean 0.7475, so A_acc is 0.2525 for the correct and 0.2425 for the 0.99; u = 0 and 1, E = ±√½, p = ½.
    """
    found = run_efficient([1, 1, 0.99, 0], [100, 1000, 100, 100])
    assert same(found, [0.2525 + 0.1 * ROOT_HALF, 0.2525 - 0.1 * ROOT_HALF, 0.2425, -0.7475])
    assert found[1] < found[2]


@settings(max_examples=15)
@given(st.integers(1, 8), st.integers(0, 4000), st.sampled_from(["std", "none"]))
def test_an_all_correct_group_with_equal_contexts_gives_exactly_zero(count: int, context: int, accuracy: str) -> None:
    assert run_efficient([1.0] * count, [context] * count, accuracy=accuracy).tolist() == [0.0] * count


def test_an_all_correct_group_is_told_apart_by_context_alone() -> None:
    assert same(run_efficient([1, 1], [100, 1000], accuracy="std"), [0.2 * ROOT_HALF, -0.2 * ROOT_HALF])


@settings(max_examples=25)
@given(CORRECTNESS, st.data(), st.integers(1, 4000), st.sampled_from([0.2, 2.0]), st.sampled_from(["std", "none"]))
def test_a_longer_context_never_raises_the_own_advantage(
    rows: Rows, data: st.DataObject, more: int, coefficient: float, accuracy: str
) -> None:
    """True in spite of the group's deviation moving along.

    With d the distance of u_i from the mean of the others and S their squares, E = −k·d/√(S + k·d²) up to a constant,
    which falls in d everywhere; so does −d over the floor of 0.1; clip and guard keep the order.
    """
    outcomes, contexts, groups = (list(column) for column in zip(*rows, strict=True))
    place = data.draw(st.integers(0, len(rows) - 1))
    options = {"coefficient": coefficient, "accuracy": accuracy}
    before = run_efficient(outcomes, contexts, groups, **options)[place]
    longer = [context + more * (one == place) for one, context in enumerate(contexts)]
    assert run_efficient(outcomes, longer, groups, **options)[place] <= before + 1e-12


@settings(max_examples=20)
@given(CORRECTNESS, st.sampled_from([0.2, 2.0]))
def test_of_two_correct_siblings_the_longer_context_never_has_the_larger_advantage(
    rows: Rows, coefficient: float
) -> None:
    outcomes, contexts, groups = (list(column) for column in zip(*rows, strict=True))
    found = run_efficient(outcomes, contexts, groups, coefficient=coefficient).tolist()
    correct = sorted((group, context, place) for place, (right, context, group) in enumerate(rows) if right == 1)
    for (group, _, shorter), (other, _, longer) in pairwise(correct):
        assert group != other or found[shorter] >= found[longer] - 1e-12


@settings(max_examples=20)
@given(CORRECTNESS, st.floats(1e-3, 1e6))
def test_the_unit_of_contexts_does_not_matter(rows: Rows, unit: float) -> None:
    outcomes, contexts, groups = (list(column) for column in zip(*rows, strict=True))
    scaled = run_efficient(
        outcomes,
        [context * unit for context in contexts],
        groups,
        context_low=100 * unit,
        context_high=1000 * unit,
    )
    assert same(scaled, run_efficient(outcomes, contexts, groups), atol=1e-9)


def test_a_context_that_is_not_finite_names_its_trajectory() -> None:
    with pytest.raises(ValueError, match=r"context of trajectory 1 .*is nan tokens"):
        estimate("efficient", [1, 1], contexts=[100, math.nan])


def test_contexts_come_one_a_trajectory() -> None:
    with pytest.raises(ValueError, match=r"needs context_N of shape \(2,\), .*found \(1,\)"):
        estimate("efficient", [1, 0], contexts=[100])
