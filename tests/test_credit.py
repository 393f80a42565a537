"""From scored trajectories to weighted rows: each trajectory counts once, whatever its number of turns or rows."""

import pytest
import torch
from builders import condensation, scored, trajectory, turn

from condensegrpo.advantages import efficient, gigpo, grpo
from condensegrpo.credit import advantages_of, idle_groups, rows_of, scores_of, turn_tokens
from condensegrpo.losses import token_weights, totals
from condensegrpo.trajectory import ScoredTrajectory


def episode(
    name: str, outputs: list[int], *, reward: float, group: str = "g", context: int = 4, total: float | None = None
) -> ScoredTrajectory:
    """One trajectory whose turns sample so many tokens each, every context rewritten."""
    turns = [
        turn(
            range(context),
            range(50, 50 + count),
            condensation=condensation("d" * index, [1] * index, before=9, after=context) if index else None,
        )
        for index, count in enumerate(outputs)
    ]
    one = trajectory(*turns, id=f"{group}/{name}", group=group)
    return scored(one, reward if total is None else total, correct=reward)


def test_advantages_are_relative_to_the_group() -> None:
    batch = [
        episode("a", [1], reward=1, group="g"),
        episode("b", [1], reward=0, group="g"),
        episode("c", [1], reward=1, group="h"),
        episode("d", [1], reward=1, group="h"),
    ]
    advantage_NK = advantages_of(scores_of(batch), grpo, {"scale": "none"})
    assert advantage_NK.flatten().tolist() == [0.5, -0.5, 0.0, 0.0]


def test_a_trajectory_of_many_rows_counts_once_in_its_group() -> None:
    """slime#1414: three rows of one success beside one failure are +.5 / −.5, not +.25 / −.75."""
    batch = [episode("a", [1, 1, 1], reward=1), episode("b", [1], reward=0)]
    advantage_NK = advantages_of(scores_of(batch), grpo, {"scale": "none"})
    assert advantage_NK.tolist() == [[0.5, 0.5, 0.5], [-0.5, 0.0, 0.0]]


def test_every_output_token_of_a_trajectory_has_its_advantage() -> None:
    """SkyRL#1492: the advantage is a number of the trajectory, not the last row's mask times it."""
    batch = [episode("a", [2, 1, 3], reward=1), episode("b", [4], reward=0)]
    advantage_NK = advantages_of(scores_of(batch), grpo, {"scale": "none"})
    rows = rows_of(batch, advantage_NK, torch.ones_like(advantage_NK))
    trained = {
        row.trajectory + str(row.first_turn): [a for a, yes in zip(row.advantages, row.trained, strict=True) if yes]
        for row in rows
    }
    assert trained == {"g/a0": [0.5, 0.5], "g/a1": [0.5], "g/a2": [0.5, 0.5, 0.5], "g/b0": [-0.5] * 4}


def test_the_efficient_estimator_sees_correctness_and_context_and_grpo_the_reward() -> None:
    batch = [
        episode("short", [1], reward=1, context=4, total=0.9),
        episode("long", [1], reward=1, context=32, total=0.2),
        episode("wrong", [1], reward=0, context=4, total=0.0),
    ]
    options = {"context_low": 4, "context_high": 32, "accuracy": "none"}
    short, long, wrong = advantages_of(scores_of(batch), efficient, options).flatten().tolist()
    assert short > long > 0 > wrong
    assert wrong == pytest.approx(-2 / 3)
    by_reward = advantages_of(scores_of(batch), grpo, {"scale": "none"}).flatten().tolist()
    assert by_reward == pytest.approx([0.9 - 1.1 / 3, 0.2 - 1.1 / 3, -1.1 / 3])


def test_a_trajectory_without_advantage_gets_no_row_but_counts_in_every_denominator() -> None:
    batch = [
        episode("a", [2], reward=1, group="g"),
        episode("b", [2], reward=0, group="g"),
        episode("c", [6], reward=1, group="h"),
        episode("d", [6], reward=1, group="h"),
    ]
    scores, tokens_NK = scores_of(batch), turn_tokens(batch)
    advantage_NK = advantages_of(scores, grpo, {})
    weight_NK = token_weights("token_mean", tokens_NK, totals=totals(tokens_NK, scores.turns_N))
    rows = rows_of(batch, advantage_NK, weight_NK)
    assert {row.trajectory for row in rows} == {"g/a", "g/b"}
    assert {weight for row in rows for weight in row.weights if weight} == {1 / 16}


def test_a_trajectory_that_sampled_nothing_stands_in_its_group_and_has_no_row() -> None:
    empty = scored(trajectory(id="g/none", group="g"), 0.0, correct=0.0)
    batch = [episode("a", [1], reward=1), empty]
    advantage_NK = advantages_of(scores_of(batch), grpo, {"scale": "none"})
    rows = rows_of(batch, advantage_NK, torch.ones_like(advantage_NK))
    assert advantage_NK.tolist() == [[0.5], [0.0]]
    assert [row.trajectory for row in rows] == ["g/a"]


@pytest.mark.parametrize("reward", [1.0, 0.0, -1.0])
def test_under_gigpo_a_group_of_one_outcome_is_idle_however_long_its_trajectories_were(reward: float) -> None:
    """All of ``episode`` share their contexts; with 3, 3, 3 and 4 turns the discount alone would tell them apart."""
    batch = [episode(str(place), [1] * turns, reward=1, total=reward) for place, turns in enumerate((3, 3, 3, 4))]
    beside = [episode("a", [1], reward=1, group="h"), episode("b", [1, 1], reward=0, group="h")]
    advantage_NK = advantages_of(scores_of([*batch, *beside]), gigpo, {})
    assert idle_groups([*batch, *beside], advantage_NK) == {"g"}


def test_a_group_whose_rewards_differ_by_rounding_alone_is_idle() -> None:
    batch = [episode(str(place), [1], reward=1, total=total) for place, total in enumerate((0.1 + 0.2, 0.3, 0.3))]
    assert idle_groups(batch, advantages_of(scores_of(batch), grpo, {"eps": 0})) == {"g"}
