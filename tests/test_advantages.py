"""Group-relative advantages, against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from condensegrpo.advantages import ESTIMATORS, efficient, grpo
from condensegrpo.errors import ScoreError

ROOT_HALF = math.sqrt(0.5)


def run_grpo(outcomes: list[float], groups: list[int], turns: list[int] | None = None, **options: object) -> Tensor:
    """grpo on doubles, where only the columns that matter to it are given."""
    turns_N = torch.tensor(turns or [1] * len(outcomes))
    outcome_N = torch.tensor(outcomes, dtype=torch.float64)
    none_N = torch.full_like(turns_N, -1)
    return grpo(outcome_N, torch.zeros_like(outcome_N), torch.tensor(groups), turns_N, none_N, **options)  # type: ignore[arg-type]


def run_efficient(
    outcomes: list[float], contexts: list[int], groups: list[int] | None = None, **options: object
) -> Tensor:
    """One column of ``efficient``, anchors 100 and 1000 tokens, accuracy unscaled unless asked for."""
    outcome_N = torch.tensor(outcomes, dtype=torch.float64)
    one_N = torch.ones(len(outcomes), dtype=torch.int64)
    settings_used = {"context_low": 100, "context_high": 1000, "accuracy": "none", **options}
    group_N = torch.tensor(groups) if groups else one_N
    context_N = torch.tensor(contexts)
    return efficient(
        outcome_N,
        torch.zeros_like(outcome_N),
        group_N,
        one_N,
        -one_N,
        context_N=context_N,
        **settings_used,  # type: ignore[arg-type]
    ).flatten()


def same(found: Tensor, wanted: list[float] | list[list[float]], atol: float = 1e-5) -> bool:
    return torch.allclose(found, torch.tensor(wanted, dtype=found.dtype), atol=atol, rtol=0)


def test_grpo_centres_on_the_group_and_divides_by_its_deviation() -> None:
    # mean 3/4; squares 3·1/16 + 9/16 = 3/4; variance with ddof 1 is 1/4, std 1/2
    assert same(run_grpo([1, 1, 1, 0], [0, 0, 0, 0]), [[0.5], [0.5], [0.5], [-1.5]])


def test_grpo_without_scaling_only_centres() -> None:
    assert same(run_grpo([1, 1, 1, 0], [0, 0, 0, 0], scale="none"), [[0.25], [0.25], [0.25], [-0.75]])


def test_grpo_adds_eps_to_the_deviation() -> None:
    # std of [0, 2] with ddof 1 is √2
    assert same(
        run_grpo([0, 2], [0, 0], eps=0.5), [[-1 / (math.sqrt(2) + 0.5)], [1 / (math.sqrt(2) + 0.5)]], atol=1e-12
    )


def test_groups_are_told_by_label_whatever_the_order() -> None:
    found = run_grpo([1, 10, 0, 30], [7, -2, 7, -2])
    assert same(found, [[ROOT_HALF], [-ROOT_HALF], [-ROOT_HALF], [ROOT_HALF]])


def test_every_turn_of_a_trajectory_has_its_scalar_and_turns_beyond_have_zero() -> None:
    # SkyRL#1492: the last step's mask broadcast to all rows; here the lengths differ as much as they can
    found = run_grpo([1, 0], [0, 0], turns=[4, 1], scale="none")
    assert found.tolist() == [[0.5, 0.5, 0.5, 0.5], [-0.5, 0, 0, 0]]


def test_statistics_count_a_trajectory_once_however_many_turns_it_made() -> None:
    # statistics over rows: the four turns of the first would count as four rewards of 1
    assert (
        run_grpo([1, 0, 0], [0, 0, 0], turns=[4, 1, 1])[:, 0].tolist() == run_grpo([1, 0, 0], [0, 0, 0])[:, 0].tolist()
    )


def test_three_rows_of_one_against_one_give_half_and_not_a_quarter() -> None:
    # slime#1414: [1, 1, 1 | 0] are two trajectories, the first of three rows
    assert run_grpo([1, 0], [0, 0], turns=[3, 1], scale="none")[:, 0].tolist() == [0.5, -0.5]


def test_uneven_groups_beside_a_constant_one() -> None:
    # slime: groups of 4, 3 and 4 with a constant group gave −1.09 there, where 0 is right
    found = run_grpo([1, 1, 0, 0, 0.3, 0.3, 0.3, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    assert found[4:7].flatten().tolist() == [0, 0, 0]
    assert same(found[:4], [[0.8660254], [0.8660254], [-0.8660254], [-0.8660254]])
    assert same(found[7:], [[1.5], [-0.5], [-0.5], [-0.5]])


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3, 4.1e-4])
def test_equal_rewards_give_exactly_zero(reward: float) -> None:
    assert run_grpo([reward] * 7, [0] * 7).tolist() == [[0.0]] * 7


def test_a_group_of_one_gives_zero_and_not_nan() -> None:
    assert run_grpo([0.7, 1, 0], [5, 6, 6], scale="none").flatten().tolist() == [0, 0.5, -0.5]
    assert run_grpo([0.7], [5]).tolist() == [[0]]


def test_a_group_of_one_may_keep_its_raw_reward() -> None:
    found = run_grpo([0.7, 1, 0], [5, 6, 6], scale="none", singleton="raw")
    assert found.flatten().tolist() == [0.7, 0.5, -0.5]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_names_its_trajectory_and_spoils_no_sibling(value: float) -> None:
    with pytest.raises(ScoreError, match=rf"outcome reward of trajectory 2 .*is {value}"):
        run_grpo([1, 0, value, 0], [0, 0, 0, 0])


def test_a_turn_reward_that_is_not_finite_is_an_error_too() -> None:
    one_N = torch.ones(2, dtype=torch.int64)
    with pytest.raises(ScoreError, match="turn reward of trajectory 1"):
        grpo(torch.zeros(2), torch.tensor([0.0, math.nan]), one_N, one_N, -one_N)


def test_tensors_of_different_shapes_are_refused() -> None:
    one_N = torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"one shape \(N,\), found \[\(3,\), \(2,\)"):
        grpo(torch.zeros(3), torch.zeros(2), one_N, one_N, -one_N)


def test_tiny_rewards_in_single_precision_keep_their_order() -> None:
    # the reward 1/C: 1/2048 and 1/2049 differ by 2.4e-7
    outcome_N = torch.tensor([1 / 2048, 1 / 2049], dtype=torch.float32)
    one_N = torch.ones(2, dtype=torch.int64)
    found = grpo(outcome_N, torch.zeros(2), one_N, one_N, -one_N, scale="none")
    assert found.dtype == torch.float32
    assert found[0, 0] > 0 > found[1, 0]


def test_no_trajectory_and_no_turn_make_empty_tables() -> None:
    assert run_grpo([], []).shape == (0, 0)
    assert run_grpo([1, 0], [0, 0], turns=[0, 2]).tolist()[0] == [0, 0]
    empty_N = torch.zeros(2, dtype=torch.int64)
    assert grpo(torch.ones(2), torch.ones(2), empty_N, empty_N, empty_N).shape == (2, 0)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 3)), min_size=1, max_size=16),
    st.sampled_from(["std", "none"]),
)
def test_advantages_are_finite_and_sum_to_zero_in_every_group(pairs: list[tuple[float, int]], scale: str) -> None:
    found = run_grpo([reward for reward, _ in pairs], [group for _, group in pairs], scale=scale).flatten()
    group_N = torch.tensor([group for _, group in pairs])
    assert found.isfinite().all()
    for group in set(group_N.tolist()):
        assert abs(float(found[group_N == group].sum())) < 1e-6


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(6)))
def test_the_order_of_trajectories_does_not_matter(order: list[int]) -> None:
    outcomes, groups = [1.0, 0.0, 0.5, 0.2, 0.9, 0.4], [0, 0, 0, 1, 1, 1]
    straight = run_grpo(outcomes, groups)
    shuffled = run_grpo([outcomes[place] for place in order], [groups[place] for place in order])
    assert torch.allclose(shuffled, straight[order], atol=1e-12)


def test_efficient_rewards_the_shorter_of_two_correct_contexts() -> None:
    # u = 0 and 1, mean ½, std √½, so E = ±√½; p = ½, λ = 0.2
    found = run_efficient([1, 1, 0, 0], [100, 1000, 100, 100])
    assert same(found, [0.5 + 0.1 * ROOT_HALF, 0.5 - 0.1 * ROOT_HALF, -0.5, -0.5])


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
def test_an_outcome_that_is_no_correctness_is_refused(value: float) -> None:
    with pytest.raises(ScoreError, match=rf"trajectory 1 .*is {value}.*use the estimator 'grpo'"):
        run_efficient([1, value], [100, 100])


@pytest.mark.parametrize(("low", "high"), [(0, 100), (100, 100), (200, 100)])
def test_context_anchors_must_rise(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="0 < context_low < context_high"):
        run_efficient([1, 1], [100, 100], context_low=low, context_high=high)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 4000), st.integers(0, 2)), min_size=1, max_size=12
    )
)
def test_efficient_keeps_its_promises(rows: list[tuple[float, int, int]]) -> None:
    outcomes, contexts, groups = (list(column) for column in zip(*rows, strict=True))
    found = run_efficient(outcomes, contexts, groups, accuracy="std")
    accuracy = run_grpo(outcomes, groups).flatten()
    assert found.isfinite().all()
    for place, outcome in enumerate(outcomes):
        if outcome < 1:
            assert found[place] == accuracy[place]
        if accuracy[place] > 0:
            assert found[place] >= 0.25 * accuracy[place] - 1e-12
        assert abs(found[place] - accuracy[place]) <= 0.2 + 1e-12


def test_the_table_names_the_estimators_of_the_configuration() -> None:
    assert dict(ESTIMATORS) == {"grpo": grpo, "efficient": efficient}
