"""Estimators of one scalar a trajectory, and the discount over its turns, against numbers worked out by hand."""

import math

import pytest
import torch
from estimating import estimate, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from condensegrpo.algorithms.advantages import Batch
from condensegrpo.algorithms.outcome_estimators import grpo
from condensegrpo.core.errors import ScoreError

ROOT_HALF = math.sqrt(0.5)


def run_grpo(outcomes: list[float], groups: list[int], turns: list[int] | None = None, **options: object) -> Tensor:
    """grpo on doubles, where only the columns that matter to it are given."""
    turns_N = torch.tensor(turns or [1] * len(outcomes))
    outcome_N = torch.tensor(outcomes, dtype=torch.float64)
    none_N = torch.full_like(turns_N, -1)
    batch = Batch(outcome_N, torch.zeros_like(outcome_N), torch.tensor(groups), turns_N, none_N)
    return grpo(batch, **options).advantage_NK


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


def test_tiny_rewards_in_single_precision_keep_their_order() -> None:
    # the reward 1/C: 1/2048 and 1/2049 differ by 2.4e-7
    outcome_N = torch.tensor([1 / 2048, 1 / 2049], dtype=torch.float32)
    one_N = torch.ones(2, dtype=torch.int64)
    found = grpo(Batch(outcome_N, torch.zeros(2), one_N, one_N, -one_N), scale="none").advantage_NK
    assert found.dtype == torch.float32
    assert found[0, 0] > 0 > found[1, 0]


def test_no_trajectory_and_no_turn_make_empty_tables() -> None:
    assert run_grpo([], []).shape == (0, 0)
    assert run_grpo([1, 0], [0, 0], turns=[0, 2]).tolist()[0] == [0, 0]
    empty_N = torch.zeros(2, dtype=torch.int64)
    assert grpo(Batch(torch.ones(2), torch.ones(2), empty_N, empty_N, empty_N - 1)).advantage_NK.shape == (2, 0)


@settings(max_examples=20)
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


@settings(max_examples=25)
@given(st.permutations(range(6)))
def test_the_order_of_trajectories_does_not_matter(order: list[int]) -> None:
    outcomes, groups = [1.0, 0.0, 0.5, 0.2, 0.9, 0.4], [0, 0, 0, 1, 1, 1]
    straight = run_grpo(outcomes, groups)
    shuffled = run_grpo([outcomes[place] for place in order], [groups[place] for place in order])
    assert torch.allclose(shuffled, straight[order], atol=1e-12)


def test_merging_adds_turn_rewards_before_it_centres() -> None:
    # R^T + R^O = [1, 4, 4]: mean 3, squares 4 + 1 + 1 = 6, variance 3
    found = estimate("grpo_merged", [0, 1, 2], turn_rewards=[1, 3, 2], turns=[2, 1, 2], eps=0)
    two, one = 2 / math.sqrt(3), 1 / math.sqrt(3)
    assert same(found, [[-two, -two], [one, 0], [one, one]], atol=1e-12)


def test_merging_keeps_both_rewards() -> None:
    """SkyRL#2104: components of a reward were dropped; here each of the two alone tells siblings apart."""
    assert same(estimate("grpo_merged", [1, 0], turn_rewards=[0, 0], scale="none"), [[0.5], [-0.5]])
    assert same(estimate("grpo_merged", [0, 0], turn_rewards=[1, 0], scale="none"), [[0.5], [-0.5]])


def test_merging_adds_an_eps_of_its_own() -> None:
    # std √½: ½/(0.7071 + 0.0001) = 0.70701
    assert same(estimate("grpo_merged", [1, 0]), [[0.7070068], [-0.7070068]], atol=1e-7)


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    # 3 − (0 + 0)/2 and 0 − (3 + 0)/2; the other group 1 − 5 and 5 − 1
    found = estimate("rloo", [3, 1, 0, 5, 0], groups=[0, 8, 0, 8, 0], turns=[1, 2, 2, 1, 1])
    assert same(found, [[3, 0], [-4, -4], [-1.5, -1.5], [4, 0], [-1.5, 0]], atol=1e-12)


def test_leave_one_out_does_not_move_with_the_own_reward_of_a_sibling_that_is_itself() -> None:
    # the baseline of the first is ½ whatever it earned itself: 10 − ½, 0 − ½
    assert estimate("rloo", [10, 1, 0])[0].item() == pytest.approx(9.5)
    assert estimate("rloo", [0, 1, 0])[0].item() == pytest.approx(-0.5)


def test_reinforce_cuts_outliers_and_divides_by_the_deviation() -> None:
    # [10, 0, 0]: mean 10/3, squares (400 + 100 + 100)/9, variance 100/3, std 10/√3
    found = estimate("reinforce", [100, 0, 0], turns=[1, 1, 2], eps=0)
    two, one = 2 / math.sqrt(3), 1 / math.sqrt(3)
    assert same(found, [[two, 0], [-one, 0], [-one, -one]], atol=1e-12)
    assert same(estimate("reinforce", [-100, 0, 0], eps=0), [[-two], [one], [one]], atol=1e-12)


def test_reinforce_takes_its_clamp_from_the_caller() -> None:
    # [1, 1, 0]: mean ⅔, squares 6/9, variance ⅓: ⅓·√3 and −⅔·√3
    found = estimate("reinforce", [7, 1, 0], clamp=1, eps=0)
    assert same(found, [[1 / math.sqrt(3)], [1 / math.sqrt(3)], [-2 / math.sqrt(3)]], atol=1e-12)


def test_reinforce_only_centres_where_the_deviation_is_no_larger_than_eps() -> None:
    # std of [0, 1] is √½ = 0.707: below 0.8, above 0.7
    assert same(estimate("reinforce", [0, 1], eps=0.8), [[-0.5], [0.5]], atol=1e-12)
    wanted = 0.5 / (ROOT_HALF + 0.7)
    assert same(estimate("reinforce", [0, 1], eps=0.7), [[-wanted], [wanted]], atol=1e-12)
    # exactly ε counts as no deviation: std of [−2, 0, 2] is 2
    assert same(estimate("reinforce", [-2, 0, 2], eps=2.0), [[-2], [0], [2]], atol=1e-12)


def test_reinforce_does_not_divide_rounding_by_rounding() -> None:
    found = estimate("reinforce", [1.0, 1.0 + 1e-15])
    assert found.abs().max() < 1e-14


def test_the_discount_counts_turns_from_each_trajectorys_own_end() -> None:
    # N = ±√½; three turns ¼, ½, 1; one turn 1
    found = estimate("turn_discounted", [1, 0], turns=[3, 1], gamma=0.5, eps=0)
    wanted = [[0.25 * ROOT_HALF, 0.5 * ROOT_HALF, ROOT_HALF], [-ROOT_HALF, 0, 0]]
    assert same(found, wanted, atol=1e-12)


def test_the_discount_is_nine_tenths_unless_told() -> None:
    assert same(estimate("turn_discounted", [1, 0], turns=[3, 1], scale="none"), [[0.405, 0.45, 0.5], [-0.5, 0, 0]])


def test_a_discount_of_nothing_trains_last_turns_only() -> None:
    found = estimate("turn_discounted", [1, 0, 0.5], turns=[3, 1, 0], gamma=0, scale="none")
    assert found.tolist() == [[0, 0, 0.5], [-0.5, 0, 0], [0, 0, 0]]


def test_the_length_of_a_trajectory_discounts_no_sibling() -> None:
    short = estimate("turn_discounted", [1, 0], turns=[1, 2])
    long = estimate("turn_discounted", [1, 0], turns=[6, 2])
    assert long[1, :2].tolist() == short[1].tolist()


def test_every_group_has_a_deviation_of_its_own() -> None:
    """trl#7068: the deviation of the whole batch was used as that of a group."""
    found = estimate("grpo", [0, 1, 0, 10], groups=[0, 0, 1, 1], eps=0)
    assert same(found, [[-ROOT_HALF], [ROOT_HALF], [-ROOT_HALF], [ROOT_HALF]], atol=1e-12)
