"""Estimators that tell turns before and after the first tool result, against numbers worked out by hand."""

import math
from typing import Any

import pytest
import torch
from estimating import Row, batches, estimate, run, same
from hypothesis import given, settings
from hypothesis import strategies as st

# A group with nice deviations. R^O = [0, 1, 2]: mean 1, std 1; R^T = [1, 3, 2]: mean 2, std 1;
# R^T + R^O = [1, 4, 4]: mean 3, std √3. No result; at turn 1 of 3; at turn 0 of 2.
GROUP: dict[str, Any] = {"turn_rewards": [1, 3, 2], "turns": [2, 3, 2], "results": [-1, 1, 0]}
OUTCOMES = [0, 1, 2]
ROOT3 = math.sqrt(3)


def test_ms_grpo_adds_turn_rewards_up_to_the_result() -> None:
    # N(R^O) = [−1, 0, 1], N(R^T) = [−1, 1, 0]; the first has no result and no turn part
    found = estimate("ms_grpo", OUTCOMES, **GROUP, eps=0)
    assert same(found, [[-1, -1, 0], [0 + 1, 0 + 1, 0], [1 + 0, 1, 0]], atol=1e-12)


def test_mt_grpo_gives_a_trajectory_without_a_result_all_its_rewards() -> None:
    # as ms_grpo, but the first has N(R^T + R^O) = (1 − 3)/√3
    found = estimate("mt_grpo", OUTCOMES, **GROUP, eps=0)
    assert same(found, [[-2 / ROOT3, -2 / ROOT3, 0], [1, 1, 0], [1, 1, 0]], atol=1e-12)


def test_ms_po_has_both_rewards_up_to_the_result_and_the_outcome_after() -> None:
    # before the result (4 − 3)/√3, after it N(R^O) = 0 and 1; without one (1 − 3)/√3 on all turns
    found = estimate("ms_po", OUTCOMES, **GROUP, eps=0)
    assert same(found, [[-2 / ROOT3, -2 / ROOT3, 0], [1 / ROOT3, 1 / ROOT3, 0], [1 / ROOT3, 1, 0]], atol=1e-12)


def test_the_turn_part_is_weighted() -> None:
    assert same(
        estimate("ms_grpo", OUTCOMES, **GROUP, eps=0, coef=-0.5), [[-1, -1, 0], [-0.5, -0.5, 0], [1, 1, 0]], atol=1e-12
    )
    assert same(
        estimate("mt_grpo", OUTCOMES, **GROUP, eps=0, coef=2),
        [[-2 / ROOT3, -2 / ROOT3, 0], [2, 2, 0], [1, 1, 0]],
        atol=1e-12,
    )


def test_ms_po_weighs_the_outcome_before_the_result_only() -> None:
    # R^T + 2·R^O = [1, 5, 6]: mean 4, deviations −3, 1, 2, variance 14/2 = 7
    root7 = math.sqrt(7)
    found = estimate("ms_po", OUTCOMES, **GROUP, eps=0, gamma=2)
    assert same(found, [[-3 / root7, -3 / root7, 0], [1 / root7, 1 / root7, 0], [2 / root7, 1, 0]], atol=1e-12)


def test_without_scaling_the_parts_are_only_centred() -> None:
    # R^O − 1, R^T − 2, R^T + R^O − 3
    assert same(estimate("ms_grpo", OUTCOMES, **GROUP, scale="none"), [[-1, -1, 0], [1, 1, 0], [1, 1, 0]])
    assert same(estimate("mt_grpo", OUTCOMES, **GROUP, scale="none"), [[-2, -2, 0], [1, 1, 0], [1, 1, 0]])
    assert same(estimate("ms_po", OUTCOMES, **GROUP, scale="none"), [[-2, -2, 0], [1, 1, 0], [1, 1, 0]])


@pytest.mark.parametrize("name", ["ms_grpo", "mt_grpo", "ms_po"])
def test_their_eps_is_a_ten_thousandth(name: str) -> None:
    # before the result all three are 1/(1 + ε) here: ms_po has R^T + R^O = [0, 1, 2], the others R^O alone
    found = estimate(name, [0, 1, 2], results=[0, 0, 0])
    assert found[2].item() == pytest.approx(1 / 1.0001, abs=1e-12)


@pytest.mark.parametrize("name", ["ms_grpo", "mt_grpo"])
def test_turn_statistics_are_over_all_trajectories_of_the_group(name: str) -> None:
    # over the two with a result alone, R^T = [3, 2] would be ±√½; over all three it is 1 and 0
    found = estimate(name, [1, 1, 1], **GROUP, eps=0)
    assert same(found[1:], [[1, 1, 0], [0, 0, 0]], atol=1e-12)


@pytest.mark.parametrize(("result", "before"), [(-1, [0, 0, 0]), (0, [1, 0, 0]), (1, [1, 1, 0]), (2, [1, 1, 1])])
def test_before_the_result_is_told_by_the_index_of_the_turn(result: int, before: list[int]) -> None:
    """Where a mask of tokens changes was taken for the end of a turn: turns that touch, or sample nothing, shifted it.

    An estimator sees no tokens: the third turn is the third whatever the others sampled. R^O is equal, R^T ± ½.
    """
    found = estimate("ms_grpo", [0, 0], turn_rewards=[1, 0], turns=[3, 3], results=[result, -1], scale="none")
    assert found.tolist() == [[0.5 * yes for yes in before], [0, 0, 0]]


@pytest.mark.parametrize("name", ["ms_grpo", "mt_grpo", "ms_po"])
def test_the_result_of_a_sibling_changes_only_its_own_turns(name: str) -> None:
    early = estimate(name, OUTCOMES, **{**GROUP, "results": [-1, 0, 0]})
    late = estimate(name, OUTCOMES, **{**GROUP, "results": [-1, 2, 0]})
    assert torch.equal(early[[0, 2]], late[[0, 2]])
    assert not torch.equal(early[1], late[1])


@settings(max_examples=15)
@given(batches(), st.sampled_from(["std", "none"]), st.sampled_from(["zero", "raw"]))
def test_ms_grpo_without_its_turn_part_is_grpo(rows: list[Row], scale: str, singleton: str) -> None:
    options = {"eps": 1e-4, "scale": scale, "singleton": singleton}
    assert run("ms_grpo", rows, coef=0, **options).tolist() == run("grpo", rows, **options).tolist()


@settings(max_examples=15)
@given(batches(), st.sampled_from([-3.0, 0.0, 0.1]), st.sampled_from(["std", "none"]))
def test_equal_turn_rewards_make_mt_grpo_grpo(rows: list[Row], reward: float, scale: str) -> None:
    """With a result to the bit; without one N(R^O + constant) is the same but for rounding."""
    level = [(outcome, reward, *rest) for outcome, _, *rest in rows]
    found, wanted = run("mt_grpo", level, scale=scale), run("grpo", level, eps=1e-4, scale=scale)
    with_result = [place for place, row in enumerate(rows) if row[4] >= 0]
    assert found[with_result].tolist() == wanted[with_result].tolist()
    assert same(found, wanted, atol=1e-9)


@settings(max_examples=15)
@given(batches(), st.sampled_from(["std", "none"]))
def test_ms_po_that_counts_no_outcome_has_turn_rewards_up_to_the_result(rows: list[Row], scale: str) -> None:
    found = run("ms_po", rows, gamma=0, scale=scale)
    turn_only = [(reward, 0.0, *rest) for _, reward, *rest in rows]
    by_turn, by_outcome = run("grpo", turn_only, eps=1e-4, scale=scale), run("grpo", rows, eps=1e-4, scale=scale)
    for place, (_, _, _, turns, result) in enumerate(rows):
        last = turns if result < 0 else result + 1
        assert found[place, :last].tolist() == by_turn[place, :last].tolist()
        assert found[place, last:turns].tolist() == by_outcome[place, last:turns].tolist()


@settings(max_examples=15)
@given(batches())
def test_before_the_result_ms_po_is_the_merged_advantage(rows: list[Row]) -> None:
    before = [(outcome, reward, group, turns, turns - 1) for outcome, reward, group, turns, _ in rows]
    assert run("ms_po", before).tolist() == run("grpo_merged", before).tolist()


@settings(max_examples=15)
@given(batches())
def test_up_to_the_result_of_all_the_parts_sum_to_zero(rows: list[Row]) -> None:
    # every trajectory with its result at its first turn: no sibling is left out of the sum
    first = [(outcome, reward, group, turns, 0) for outcome, reward, group, turns, _ in rows]
    for name in ("ms_grpo", "mt_grpo", "ms_po"):
        column_N = run(name, first)[:, 0]
        for group in {row[2] for row in rows}:
            assert abs(sum(column_N[place].item() for place, row in enumerate(rows) if row[2] == group)) < 1e-9


def test_trajectories_without_a_result_do_not_share_in_the_turn_part() -> None:
    """What the docstring warns of: N(R^T) was centred on all three, and only part of it is handed out."""
    found = estimate("ms_grpo", [1, 1, 1], **GROUP, eps=0)
    assert float(found[:, 0].sum()) == pytest.approx(1)
