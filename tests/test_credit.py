"""From scored trajectories to weighted rows: each trajectory counts once, whatever its number of turns or rows."""

from dataclasses import replace

import pytest
import torch
from builders import condensation, scored, trajectory, turn
from estimating import ESTIMATORS, of_scores
from token_columns import columns, trained_tokens

from condensegrpo.algorithms.credit import (
    Estimator,
    act_turns,
    condense_turns,
    idle_groups,
    rows_of,
    scores_of,
    turn_tokens,
)
from condensegrpo.algorithms.objective import token_weights, totals
from condensegrpo.algorithms.settings import StopSettings
from condensegrpo.core.messages import Message
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Rejected, StopReason


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
    advantage_NK = of_scores("grpo", {"scale": "none"})(scores_of(batch))
    assert advantage_NK.flatten().tolist() == [0.5, -0.5, 0.0, 0.0]


def test_a_trajectory_of_many_rows_counts_once_in_its_group() -> None:
    """slime#1414: three rows of one success beside one failure are +.5 / −.5, not +.25 / −.75."""
    batch = [episode("a", [1, 1, 1], reward=1), episode("b", [1], reward=0)]
    advantage_NK = of_scores("grpo", {"scale": "none"})(scores_of(batch))
    assert advantage_NK.tolist() == [[0.5, 0.5, 0.5], [-0.5, 0.0, 0.0]]


def test_every_output_token_of_a_trajectory_has_its_advantage() -> None:
    """SkyRL#1492: the advantage is a number of the trajectory, not the last row's mask times it."""
    batch = [episode("a", [2, 1, 3], reward=1), episode("b", [4], reward=0)]
    advantage_NK = of_scores("grpo", {"scale": "none"})(scores_of(batch))
    rows = rows_of(batch, advantage_NK, torch.ones_like(advantage_NK))
    trained = {
        row.trajectory + str(row.first_turn): [turn.advantage for turn in row.turns for _ in turn.positions]
        for row in rows
    }
    assert trained == {"g/a0": [0.5, 0.5], "g/a1": [0.5], "g/a2": [0.5, 0.5, 0.5], "g/b0": [-0.5] * 4}


def test_the_efficient_estimator_sees_the_reward_and_the_context_and_grpo_the_reward() -> None:
    """What the reward itself calls correct plays no part."""
    batch = [
        episode("short", [1], reward=0, context=4, total=1.0),
        episode("long", [1], reward=0, context=32, total=1.0),
        episode("wrong", [1], reward=1, context=4, total=0.0),
    ]
    options = {"context_low": 4, "context_high": 32, "accuracy": "none"}
    short, long, wrong = of_scores("efficient", options)(scores_of(batch)).flatten().tolist()
    assert short > long > 0 > wrong
    assert wrong == pytest.approx(-2 / 3)
    by_reward = of_scores("grpo", {"scale": "none"})(scores_of(batch)).flatten().tolist()
    assert by_reward == pytest.approx([1 / 3, 1 / 3, -2 / 3])


def test_a_penalised_stop_is_a_score_of_0_for_efficient_whatever_the_penalty() -> None:
    batch = [episode("a", [1], reward=1), episode("b", [1], reward=1)]
    late = replace(batch[1].trajectory, stop=StopReason.TURN_LIMIT, answer=None)
    stops = StopSettings(handling={StopReason.TURN_LIMIT: "penalise"}, penalty=3.0)
    scores = scores_of([batch[0], replace(batch[1], trajectory=late)], stops)
    assert Estimator(ESTIMATORS["efficient"]).outcome(scores).tolist() == [1.0, 0.0]
    assert Estimator(ESTIMATORS["grpo"]).outcome(scores).tolist() == [1.0, -2.0]


def test_a_trajectory_without_advantage_gets_no_row_but_counts_in_every_denominator() -> None:
    batch = [
        episode("a", [2], reward=1, group="g"),
        episode("b", [2], reward=0, group="g"),
        episode("c", [6], reward=1, group="h"),
        episode("d", [6], reward=1, group="h"),
    ]
    scores, tokens_NK = scores_of(batch), turn_tokens(batch)
    advantage_NK = of_scores("grpo")(scores)
    weight_NK = token_weights("token_mean", tokens_NK, totals=totals(tokens_NK, scores.turns_N))
    rows = rows_of(batch, advantage_NK, weight_NK)
    assert {row.trajectory for row in rows} == {"g/a", "g/b"}
    assert {weight for row in rows for weight in columns(row).weights if weight} == {1 / 16}


def test_a_context_whose_replies_have_no_advantage_gets_no_row_unless_a_kl_term_trains_it() -> None:
    batch, advantage_NK = [episode("a", [2, 1, 3], reward=1)], torch.tensor([[0.0, 0.0, 0.5]])
    weight_NK = torch.ones_like(advantage_NK)
    assert [row.first_turn for row in rows_of(batch, advantage_NK, weight_NK)] == [2]
    assert [row.first_turn for row in rows_of(batch, advantage_NK, weight_NK, kl=True)] == [0, 1, 2]
    appended = trajectory(turn([1], [50]), turn([1, 50, 2], [51]), turn([1, 50, 2, 51, 2], [52]), id="b", group="g")
    (row,) = rows_of([scored(appended, 1.0, correct=1.0)], advantage_NK, weight_NK)
    assert [turn.advantage for turn in row.turns] == [0.0, 0.0, 0.5]


def test_a_trajectory_that_sampled_nothing_stands_in_its_group_and_has_no_row() -> None:
    empty = scored(trajectory(id="g/none", group="g"), 0.0, correct=0.0)
    batch = [episode("a", [1], reward=1), empty]
    advantage_NK = of_scores("grpo", {"scale": "none"})(scores_of(batch))
    rows = rows_of(batch, advantage_NK, torch.ones_like(advantage_NK))
    assert advantage_NK.tolist() == [[0.5], [0.0]]
    assert [row.trajectory for row in rows] == ["g/a"]


@pytest.mark.parametrize("reward", [1.0, 0.0, -1.0])
def test_under_gigpo_a_group_of_one_outcome_is_idle_however_long_its_trajectories_were(reward: float) -> None:
    """All of ``episode`` share their contexts; with 3, 3, 3 and 4 turns the discount alone would tell them apart."""
    batch = [episode(str(place), [1] * turns, reward=1, total=reward) for place, turns in enumerate((3, 3, 3, 4))]
    beside = [episode("a", [1], reward=1, group="h"), episode("b", [1, 1], reward=0, group="h")]
    advantage_NK = of_scores("gigpo")(scores_of([*batch, *beside]))
    assert idle_groups([*batch, *beside], advantage_NK) == {"g"}


def test_a_group_whose_rewards_differ_by_rounding_alone_is_idle() -> None:
    batch = [episode(str(place), [1], reward=1, total=total) for place, total in enumerate((0.1 + 0.2, 0.3, 0.3))]
    assert idle_groups(batch, of_scores("grpo", {"eps": 0})(scores_of(batch))) == {"g"}


# --- condense turns ---------------------------------------------------------------------------------------------------


def kinds(text: str, reward: float, name: str, *, rejected: int = 0) -> ScoredTrajectory:
    """A trajectory of act and condense turns, one letter each, of one token each, and some rejected texts."""
    one = episode(name, [1] * len(text), reward=reward).trajectory
    turns = tuple(
        replace(turn, kind="act" if letter == "a" else "condense") for turn, letter in zip(one.turns, text, strict=True)
    )
    texts = tuple(
        Rejected(before=1, prompt_ids=(1,), output_ids=(60, 61), policy_version=0, text="no", reason="it is empty")
        for _ in range(rejected)
    )
    return scored(replace(one, turns=turns, rejected=texts), reward, correct=reward)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("a", [0]), ("aca", [0, 1, 1]), ("aacac", [0, 1, 2, 2, 2]), ("acca", [0, 1, 1, 1]), ("", []), ("c", [-1])],
)
def test_a_condense_turn_has_the_advantage_of_the_reply_that_it_was_written_for(text: str, wanted: list[int]) -> None:
    assert act_turns(kinds(text, 1, "a").trajectory) == wanted


def test_a_summary_shares_the_trajectorys_advantage_and_moves_no_group_statistic() -> None:
    batch = [kinds("acacaca", 1, "a"), kinds("a", 0, "b"), kinds("aa", 1, "c")]
    plain = [kinds("aaaa", 1, "a"), kinds("a", 0, "b"), kinds("aa", 1, "c")]
    found = of_scores("grpo")(scores_of(batch))
    assert found[0].tolist() == [found[0, 0].item()] * 7
    assert [row[0].item() for row in found] == [row[0].item() for row in of_scores("grpo")(scores_of(plain))]


def test_a_discount_over_turns_counts_replies_and_not_summaries() -> None:
    options = {"gamma": 0.5, "scale": "none"}
    often, never = (
        of_scores("turn_discounted", options)(scores_of([kinds(text, 1, "a"), kinds("a", 0, "b")]))
        for text in ("acaca", "aaa")
    )
    assert never[0].tolist() == [0.125, 0.25, 0.5]
    assert often[0].tolist() == [0.125, 0.25, 0.25, 0.5, 0.5]


def test_turn_rewards_before_the_first_result_count_by_replies() -> None:
    """The result came in the second reply, the fourth turn: b(t) is 1 up to it, summaries in between included."""
    one = kinds("acca" + "ca", 1, "a")
    result = Message(role="tool", content="4", tool_call_id="call_0", name="add")
    answered = replace(one.trajectory.turns[3], observations=(result,), turn_rewards={"hint": 1.0})
    turns = (*one.trajectory.turns[:3], answered, *one.trajectory.turns[4:])
    with_result = ScoredTrajectory.of(replace(one.trajectory, turns=turns), one.score)
    scores = scores_of([with_result, kinds("a", 1, "b")])
    assert scores.result_turn_N.tolist() == [1, -1]
    found = of_scores("ms_grpo")(scores)
    assert found[0].tolist() == pytest.approx([found[0, 0].item()] * 4 + [0.0, 0.0])
    assert found[0, 0] > 0


def test_the_context_of_a_summary_is_no_state_to_gigpo() -> None:
    assert scores_of([kinds("aca", 1, "a")]).state_NK.shape == (1, 2)


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - {"efficient"}))
def test_every_estimator_gives_every_turn_an_advantage(estimator: str) -> None:
    batch = [kinds("acaac", 1, "a"), kinds("aca", 0, "b")]
    found = of_scores(estimator)(scores_of(batch))
    assert found.shape == (2, 5)
    assert (found[0] != 0).all()
    assert found[1].tolist()[3:] == [0.0, 0.0]


def test_summary_tokens_are_trained_exactly_once_and_rejected_ones_never() -> None:
    batch = [kinds("acac", 1, "a", rejected=3), kinds("a", 0, "b", rejected=1)]
    advantage_NK = of_scores("grpo")(scores_of(batch))
    rows = rows_of(batch, advantage_NK, torch.ones_like(advantage_NK))
    trained = [token for row in rows for token in trained_tokens(row)]
    assert sorted(trained) == sorted(
        token for one in batch for turn in one.trajectory.turns for token in turn.output_ids
    )
    assert not {60, 61} & {token for row in rows for token in row.token_ids}
    assert turn_tokens(batch).tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]


def test_which_turns_wrote_summaries_is_told_as_a_table() -> None:
    batch = [kinds("aca", 1, "a"), kinds("a", 0, "b")]
    assert condense_turns(batch).tolist() == [[False, True, False], [False, False, False]]
