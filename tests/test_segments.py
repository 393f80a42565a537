"""Rows of training data: every sampled token once, under the context it was sampled from."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_columns import columns, places_of, trained_tokens

from condensegrpo.algorithms.segments import broken_invariants, segments
from condensegrpo.core.errors import PrefixBroken
from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import (
    Condensation,
    Segment,
    Span,
    SpanStatus,
    StopReason,
    TrainedTurn,
    Trajectory,
    Turn,
)


def turn(prompt: Sequence[int], output: Sequence[int], *, condensed: Condensation | None = None) -> Turn:
    return Turn(
        prompt_ids=tuple(prompt),
        output_ids=tuple(output),
        logprobs=tuple(-token / 100 for token in output),
        policy_version=0,
        condensation=condensed,
        context=(),
        reply=Message(role="assistant", content=""),
    )


def declared(tokens_after: int, *turns: int) -> Condensation:
    spans = tuple(Span(first=index, last=index, units=1, status=SpanStatus.DROPPED, tokens=3) for index in turns)
    return Condensation(condenser="last_k", reason="", tokens_before=99, tokens_after=tokens_after, spans=spans)


def trajectory(*turns: Turn, stop: StopReason = StopReason.TURN_LIMIT, answer: str | None = None) -> Trajectory:
    return Trajectory(
        id="q/0", problem_id="q", group_id="q", sample=0, turns=turns, stop=stop, answer=answer, seconds=0
    )


def rows(one: Trajectory) -> tuple[Segment, ...]:
    """The segments with advantage 1, 2, 3, … and weight ½, ¼, ⅛, … for the turns."""
    count = len(one.turns)
    return segments(one, advantage_K=[1.0 + t for t in range(count)], weight_K=[0.5 ** (1 + t) for t in range(count)])


def trained_ids(found: Sequence[Segment]) -> list[int]:
    return [token for row in found for token in trained_tokens(row)]


CONTINUING = (turn([1, 2], [10]), turn([1, 2, 10, 20], [11, 12]))  # 20 is a tool's answer
CONDENSED = turn([90, 91], [13], condensed=declared(2, 0, 1))


def test_turns_that_continue_each_other_are_one_row() -> None:
    (row,) = rows(trajectory(*CONTINUING))
    assert row == Segment(
        token_ids=(1, 2, 10, 20, 11, 12),
        turns=(
            TrainedTurn(turn=0, start=2, logprobs=(-0.10,), advantage=1, weight=0.5),
            TrainedTurn(turn=1, start=4, logprobs=(-0.11, -0.12), advantage=2, weight=0.25),
        ),
        trajectory="q/0",
        first_turn=0,
    )


def test_a_declared_condensation_opens_a_second_row() -> None:
    first, second = rows(trajectory(*CONTINUING, CONDENSED))
    assert first.token_ids == (1, 2, 10, 20, 11, 12)
    assert (second.first_turn, second.token_ids, columns(second).trained) == (2, (90, 91, 13), (False, False, True))
    assert (columns(second).advantages, columns(second).weights) == ((0, 0, 3), (0, 0, 0.125))
    assert columns(second).turns == (-1, -1, 2)


def test_turns_after_a_condensation_continue_the_new_row() -> None:
    first, second = rows(trajectory(*CONTINUING, CONDENSED, turn([90, 91, 13, 21], [14])))
    assert (first.first_turn, second.first_turn) == (0, 2)
    assert second.token_ids == (90, 91, 13, 21, 14)
    assert columns(second).advantages == (0, 0, 3, 0, 4)


def test_a_condensation_that_changed_nothing_merges_all_the_same() -> None:
    one = trajectory(CONTINUING[0], replace(CONTINUING[1], condensation=declared(4, 0)))
    assert [row.token_ids for row in rows(one)] == [(1, 2, 10, 20, 11, 12)]


def test_a_condense_turn_is_trained_like_any_other() -> None:
    summary = replace(turn([1, 2, 10, 20, 30], [40, 41]), kind="condense")
    first, second = rows(trajectory(CONTINUING[0], summary, turn([1, 40, 41], [12], condensed=declared(3, 0))))
    assert trained_ids([first]) == [10, 40, 41]
    assert trained_ids([second]) == [12]


def test_few_shot_assistant_messages_in_the_prompt_are_not_trained() -> None:
    # NeMo-RL#2176: assistant turns of the prompt's history trained as if they had been sampled
    few_shot = [1, 10, 11, 2]  # 10 11 look just like the sampled reply
    assert trained_ids(rows(trajectory(turn(few_shot, [10, 11])))) == [10, 11]
    assert places_of(rows(trajectory(turn(few_shot, [10, 11])))[0]) == [4, 5]


def test_a_stop_id_that_is_also_the_padding_id_is_trained() -> None:
    # trl#4974: padding inferred from the id; here 0 pads elsewhere, ends replies and stands in prompts
    (row,) = rows(trajectory(turn([0, 5], [7, 0]), turn([0, 5, 7, 0, 6], [0])))
    assert columns(row).trained == (False, False, True, True, False, True)


def test_the_number_of_trained_tokens_counts_gaps_out() -> None:
    # OpenRLHF#1243: tool tokens counted as response, by span instead of by sum
    (row,) = rows(trajectory(turn([1], [2]), turn([1, 2, 50, 51, 52, 53], [3])))
    assert row.trained == 2


def test_every_token_of_a_turn_has_its_advantage_however_long_the_turn() -> None:
    # SkyRL#1492: the advantage broadcast with the last step's mask
    long, short = turn([1], range(100, 150)), turn([9], [8], condensed=declared(1, 0))
    first, second = rows(trajectory(long, short))
    assert set(columns(first).advantages[1:]) == {1.0}
    assert set(columns(second).advantages[1:]) == {2.0}


def test_an_undeclared_rewrite_names_turn_token_and_both_ids() -> None:
    with pytest.raises(
        PrefixBroken, match=r"turn 1 does not continue turn 0: at token 2 the prompt holds 99, .* had 10"
    ):
        rows(trajectory(CONTINUING[0], turn([1, 2, 99, 20], [11])))


def test_a_prompt_that_ends_within_the_last_turn_is_broken_too() -> None:
    with pytest.raises(PrefixBroken, match=r"at token 2 the prompt ends, .* had 10"):
        rows(trajectory(CONTINUING[0], turn([1, 2], [11])))


def test_a_template_that_strips_reasoning_is_an_error_until_it_is_declared() -> None:
    # prime-rl#1334: turn 1's template dropped the thought 60 61, so that its prompt is no extension of turn 0
    thought = turn([1, 2], [60, 61, 7])
    with pytest.raises(PrefixBroken, match=r"at token 2"):
        rows(trajectory(thought, turn([1, 2, 7, 3], [8])))
    first, second = rows(trajectory(thought, turn([1, 2, 7, 3], [8], condensed=declared(4, 0))))
    assert trained_ids([first, second]) == [60, 61, 7, 8]


def test_a_turn_that_sampled_nothing_is_context_to_its_row() -> None:
    (row,) = rows(trajectory(turn([1], []), turn([1, 2], [3])))
    assert (row.token_ids, columns(row).trained, row.first_turn) == ((1, 2, 3), (False, False, True), 0)


def test_a_row_in_which_nothing_was_sampled_is_left_out() -> None:
    assert rows(trajectory(turn([1], []))) == ()
    assert [row.first_turn for row in rows(trajectory(turn([1], []), turn([5], [6], condensed=declared(1, 0))))] == [1]


def test_a_trajectory_without_turns_has_no_rows() -> None:
    assert rows(trajectory()) == ()


def test_a_row_of_the_advantage_table_may_be_longer_than_the_trajectory() -> None:
    (row,) = segments(trajectory(CONTINUING[0]), advantage_K=[3.0, 0.0, 0.0], weight_K=[1.0, 0.0, 0.0])
    assert columns(row).advantages == (0, 0, 3)


def test_turns_that_touch_are_told_apart_by_their_index() -> None:
    """By turn index, never by mask transitions: nothing stands between the two replies."""
    (row,) = rows(trajectory(turn([1, 2], [10]), turn([1, 2, 10], [11, 12])))
    assert columns(row).turns == (-1, -1, 0, 1, 1)
    assert columns(row).advantages == (0, 0, 1, 2, 2)


@pytest.mark.parametrize("weight", [-0.5, math.nan, math.inf])
def test_a_weight_that_could_turn_a_loss_round_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=rf"trajectory 'q/0' has a turn whose tokens weigh {weight}"):
        segments(trajectory(*CONTINUING), advantage_K=[1, 1], weight_K=[1.0, weight])


def test_too_few_advantages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'q/0' has 2 turns .* found 1 advantages and 2 weights"):
        segments(trajectory(*CONTINUING), advantage_K=[1.0], weight_K=[1.0, 1.0])


@st.composite
def episodes(draw: st.DrawFn) -> Trajectory:
    """Turns of random ids, so that any splitting of any text into tokens may occur; each continues or is condensed."""
    ids = st.lists(st.integers(0, 5), max_size=4)
    turns: list[Turn] = []
    for index in range(draw(st.integers(0, 5))):
        added, output, condense = draw(ids), draw(ids), draw(st.booleans())
        if turns and not condense:
            prompt = [*turns[-1].prompt_ids, *turns[-1].output_ids, *added]
            turns.append(turn(prompt, output))
        else:
            turns.append(
                turn([draw(st.integers(0, 5)), *added], output, condensed=declared(len(added) + 1, *range(index)))
            )
    return trajectory(*turns)


@settings(max_examples=60)
@given(episodes())
def test_every_sampled_token_is_trained_exactly_once_in_order(one: Trajectory) -> None:
    assert trained_ids(rows(one)) == [token for each in one.turns for token in each.output_ids]


@settings(max_examples=60)
@given(episodes())
def test_a_trained_token_keeps_the_context_log_probability_and_credit_of_its_turn(one: Trajectory) -> None:
    # trl#5224, Agent-R1#30: rows rebuilt from text differ from what was sampled; here they are byte-identical
    found = [
        (
            row.token_ids[:place],
            row.token_ids[place],
            columns(row).logprobs[place],
            columns(row).advantages[place],
            columns(row).weights[place],
        )
        for row in rows(one)
        for place in places_of(row)
    ]
    wanted = [
        (each.prompt_ids + each.output_ids[:place], token, each.logprobs[place], 1.0 + index, 0.5 ** (1 + index))
        for index, each in enumerate(one.turns)
        for place, token in enumerate(each.output_ids)
    ]
    assert found == wanted


@settings(max_examples=100)
@given(episodes())
def test_two_rows_in_a_row_could_not_have_been_one(one: Trajectory) -> None:
    found = rows(one)
    for row in found[1:]:
        last = one.turns[row.first_turn - 1]
        whole = last.prompt_ids + last.output_ids
        assert one.turns[row.first_turn].prompt_ids[: len(whole)] != whole


@settings(max_examples=50)
@given(episodes())
def test_whatever_segments_accepts_is_found_in_order(one: Trajectory) -> None:
    assert broken_invariants(one) == ()


def test_check_finds_nothing_wrong_with_a_condensed_trajectory() -> None:
    assert broken_invariants(trajectory(*CONTINUING, CONDENSED, stop=StopReason.ANSWERED, answer="7")) == ()


def test_check_finds_an_undeclared_rewrite() -> None:
    (breach,) = broken_invariants(trajectory(CONTINUING[0], turn([1, 2, 99], [11])))
    assert breach.startswith("turn 1 does not continue turn 0: at token 2 the prompt holds 99")


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 0.01])
def test_check_finds_a_log_probability_that_is_none(value: float) -> None:
    (breach,) = broken_invariants(trajectory(replace(turn([1], [2, 3]), logprobs=(-0.1, value))))
    assert breach.startswith(f"turn 0: the log-probability of output token 1 is {value}")


def test_check_allows_a_log_probability_rounded_above_zero() -> None:
    assert broken_invariants(trajectory(replace(turn([1], [2]), logprobs=(5e-5,)))) == ()


@pytest.mark.parametrize("units", [(), (0,), (1, 0), (0, 0, 1), (0, 1, 2)])
def test_check_finds_units_that_a_condensation_lost_doubled_or_disordered(units: tuple[int, ...]) -> None:
    (breach,) = broken_invariants(trajectory(*CONTINUING, replace(CONDENSED, condensation=declared(2, *units))))
    assert breach == (
        f"turn 2: the condensation by 'last_k' accounts for the units {[(unit, unit, 1) for unit in units]} (first "
        f"turn, last turn, how many), wanted every earlier one once and in order: [0, 1]"
    )


def test_check_finds_a_run_that_claims_units_it_does_not_have() -> None:
    run = replace(declared(2, 0).spans[0], last=2, units=2)  # the units 0 and 1 are of the turns 0 and 1
    (breach,) = broken_invariants(
        trajectory(*CONTINUING, replace(CONDENSED, condensation=replace(declared(2), spans=(run,))))
    )
    assert "accounts for the units [(0, 2, 2)]" in breach


def test_check_counts_condense_turns_as_no_unit() -> None:
    summary = replace(turn([1, 2, 10, 20], [30]), kind="condense")
    assert broken_invariants(trajectory(CONTINUING[0], summary, turn([1, 30], [12], condensed=declared(2, 0)))) == ()


def test_check_finds_a_wrong_token_count() -> None:
    (breach,) = broken_invariants(trajectory(*CONTINUING, replace(CONDENSED, condensation=declared(5, 0, 1))))
    assert breach == "turn 2: the condensation by 'last_k' claims 5 tokens after it, the prompt has 2"


@pytest.mark.parametrize(("stop", "answer"), [(StopReason.ANSWERED, None), (StopReason.TURN_LIMIT, "7")])
def test_check_finds_an_answer_at_odds_with_the_stop(stop: StopReason, answer: str | None) -> None:
    (breach,) = broken_invariants(trajectory(*CONTINUING, stop=stop, answer=answer))
    assert breach.startswith(f"the trajectory stopped as {stop.value!r} with the answer {answer!r}")


def test_check_lists_every_breach() -> None:
    broken = replace(turn([5], [6], condensed=declared(3)), logprobs=(math.nan,))
    assert len(broken_invariants(trajectory(CONTINUING[0], broken, stop=StopReason.ANSWERED))) == 4
