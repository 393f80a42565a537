"""The estimator of FoldGRPO by hand: every turn has what it was paid itself."""

import math

import pytest
import torch
from builders import scored, trajectory, turn
from estimating import estimate
from test_credit_step import of_turns

from condensegrpo.algorithms.credit import scores_of

PAID = torch.tensor([[0.0, -1.0], [-1.0, 0.0]], dtype=torch.float64)
ROOT = math.sqrt(0.5)


def test_a_penalty_reaches_its_own_turn_in_units_of_the_outcome_and_is_clipped_where_the_outcome_is_least() -> None:
    found = estimate("fold_grpo", [1, 0], turns=[2, 1], turn_reward_NK=PAID, eps=0)
    assert found.tolist() == [pytest.approx([ROOT, ROOT - math.sqrt(2)]), pytest.approx([-ROOT, 0])]
    unscaled = estimate("fold_grpo", [1, 0], turns=[2, 1], turn_reward_NK=PAID, scale="none")
    assert unscaled.tolist() == [[0.5, -0.5], [-0.5, 0]]


@pytest.mark.parametrize("scale", ["std", "none"])
def test_where_all_outcomes_are_equal_there_is_no_signal(scale: str) -> None:
    found = estimate("fold_grpo", [1, 1], turns=[2, 2], turn_reward_NK=PAID / 4, scale=scale)
    assert found.tolist() == [[0, 0], [0, 0]]


def test_an_outcome_beyond_the_clip_is_itself_the_bound() -> None:
    # 3 − ½ is beyond 1 already, 1 − ½ is within; a turn of the outcome −1 is lifted by nothing below 0
    found = estimate("fold_grpo", [3, 1], turns=[2, 2], turn_reward_NK=PAID / 2, scale="none")
    assert found.tolist() == [[1, 0.5], [-1.5, -1]]
    bonus = torch.tensor([[0.5, 0.0], [0.5, -0.5]], dtype=torch.float64)
    found = estimate("fold_grpo", [3, -1], turns=[2, 2], turn_reward_NK=bonus, scale="none")
    assert found.tolist() == [[2, 2], [-1.5, -2]]
    with pytest.raises(ValueError, match="wanted low <= high"):
        estimate("fold_grpo", [1, 0], turns=[2, 1], turn_reward_NK=PAID, low=2)


def test_a_text_for_a_condenser_adds_what_it_is_paid_to_the_turn_that_it_was_written_for() -> None:
    made = of_turns([("act", 1), ("condense", 2), ("act", 1)], 0).trajectory
    one = scored(made, 1.0, turn_rewards=[0.5, -1, 0.25])
    other = scored(trajectory(turn([1], [2]), id="p0/1"), 0.0)
    found = scores_of([one, other])
    assert found.turn_reward_NK.tolist() == [[0.5, -0.75], [0, 0]]
    assert float(found.turn_reward_NK.sum()) == float(found.turn_N.sum())
