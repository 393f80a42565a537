"""Applying a reward, and what turns earned."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from builders import trajectory, turn, user
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.errors import ScoreError
from condensegrpo.messages import Message
from condensegrpo.protocols import Problem, RewardResult
from condensegrpo.rollout.scoring import score, turn_sums
from condensegrpo.rollout.toolcalls import TOOL_FORMATS
from condensegrpo.trajectory import Score, Stop, Trajectory, Turn

PROBLEM = Problem(id="p0", question="3 + 4?", answer="7")
ONE = trajectory(turn([1, 2, 3], [4]), turn([1, 2, 3, 4, 5], [6]), id="p0/3")


def paying(given: Mapping[str, float] | RewardResult, one: Trajectory = ONE) -> Score:
    """The score under a reward that always gives this."""

    def fixed(trajectory: Trajectory, problem: Problem) -> Mapping[str, float] | RewardResult:
        return given

    return score(one, PROBLEM, fixed)


# --- score ----------------------------------------------------------------------------------------------------------


def test_parts_add_up_to_the_total() -> None:
    assert paying({"brevity": 0.25, "style": 0.5}) == Score(
        total=0.75,
        components={"brevity": 0.25, "style": 0.5},
        format_valid=True,
        correct=0.0,  # a total below 1
        context_tokens=5,  # the larger of the two prompts
    )


def test_a_result_is_taken_as_it_is() -> None:
    result = RewardResult(total=0.005, components={"inverse": 0.005}, format_valid=True, correct=1.0)
    scored = paying(result)
    assert (scored.total, scored.correct, scored.components) == (0.005, 1.0, {"inverse": 0.005})


def test_parts_named_format_and_correct_are_the_judgements() -> None:
    scored = paying({"format": 0.0, "correct": 0.5, "bonus": 2.0})
    assert (scored.total, scored.format_valid, scored.correct) == (2.5, False, 0.5)


def test_where_the_reward_does_not_judge_plain_rules_do() -> None:
    assert paying({"sum": 1.0}).correct == 1.0
    assert paying({"sum": 0.99}).correct == 0.0
    assert paying({"sum": 1.0}).format_valid
    assert not paying({"sum": 1.0}, replace(ONE, stop=Stop.FORMAT, answer=None)).format_valid
    assert paying(RewardResult(total=1.0)).correct == 1.0


def test_a_trajectory_without_turns_has_a_context_of_zero() -> None:
    assert paying({"sum": 0.0}, trajectory(stop=Stop.CONTEXT_OVERFLOW, answer=None)).context_tokens == 0


def test_whole_numbers_become_floats() -> None:
    scored = paying({"correct": 1, "bonus": True})
    assert scored.total == 2.0
    assert all(type(value) is float for value in (scored.total, scored.correct, *scored.components.values()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_names_trajectory_and_value(value: float) -> None:
    with pytest.raises(ScoreError, match=rf"trajectory p0/3 .* reward fixed: bonus is {value}"):
        paying({"bonus": value, "correct": 1.0})
    with pytest.raises(ScoreError, match=f"p0/3 .* total is {value}"):
        paying(RewardResult(total=value, correct=1.0))
    with pytest.raises(ScoreError, match=f"p0/3 .* correct is {value}"):
        paying(RewardResult(total=1.0, correct=value))


def test_a_result_of_a_mapping_holds_its_sum_its_parts_and_its_judgements() -> None:
    assert RewardResult.of({"correct": 1, "format": 0, "brevity": 0.5}) == RewardResult(
        total=1.5, components={"correct": 1.0, "format": 0.0, "brevity": 0.5}, format_valid=False, correct=1.0
    )
    assert RewardResult.of({"brevity": 0.5}) == RewardResult(total=0.5, components={"brevity": 0.5})
    assert RewardResult.of({}) == RewardResult(total=0.0)


def test_a_result_of_a_result_is_the_same_in_floats() -> None:
    found = RewardResult.of(RewardResult(total=1, components={"a": True}, format_valid=False, correct=0))
    assert found == RewardResult(total=1.0, components={"a": 1.0}, format_valid=False, correct=0.0)
    assert [type(value) for value in (found.total, found.correct, found.components["a"])] == [float] * 3


def test_infinities_that_cancel_are_found() -> None:
    with pytest.raises(ScoreError, match=r"p0/3 .* plus is inf"):
        paying({"plus": float("inf"), "minus": float("-inf")})


def test_correctness_outside_its_range_is_an_error() -> None:
    with pytest.raises(ScoreError, match=r"correct is 2.0, wanted a value in \[0, 1\]"):
        paying({"correct": 2.0})


class Broken:
    """A reward that raises."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        raise KeyError("level")


class Silent:
    """A reward that gives nothing."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        return None  # type: ignore[return-value]


def test_a_reward_that_raises_is_named_with_its_trajectory() -> None:
    with pytest.raises(
        ScoreError, match="scoring trajectory p0/3 of problem p0 with the reward Broken: KeyError: 'level'"
    ):
        score(ONE, PROBLEM, Broken())


def test_a_reward_that_gives_nothing_is_named() -> None:
    with pytest.raises(ScoreError, match=r"p0/3 .* the reward Silent: "):
        score(ONE, PROBLEM, Silent())


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(-100, 100), max_size=6))
@settings(max_examples=50, deadline=None)
def test_the_breakdown_accounts_for_the_total(parts: dict[str, float]) -> None:
    scored = paying(parts)
    assert scored.total == pytest.approx(sum(scored.components.values()))


# --- turns ----------------------------------------------------------------------------------------------------------


def earning(**rewards: float) -> Turn:
    return replace(turn([1], [2]), turn_rewards=rewards)


def seeing(*observations: Message) -> Turn:
    return turn([1], [2], observations=observations)


def test_turn_rewards_are_summed_over_turns_and_names_without_the_count_of_attempts() -> None:
    one = trajectory(
        earning(tool_attempts=2.0, tool_successes=1.0), earning(hint=-0.5, tool_attempts=1.0), turn([1], [2])
    )
    assert turn_sums(one).total == 0.5


@pytest.mark.parametrize("tool_format", ["native", "tagged"])
def test_the_result_turn_is_the_first_that_a_tool_answered(tool_format: str) -> None:
    result = TOOL_FORMATS[tool_format].result("call_0", "calculator", "24")
    assert turn_sums(trajectory(seeing(user("go on")), seeing(result), seeing(result))).result_turn == 1
    assert turn_sums(trajectory(seeing(result), seeing(user("go on")))).result_turn == 0


def test_an_error_that_answers_a_call_is_a_result() -> None:
    error = TOOL_FORMATS["tagged"].result("call_0", "", "Error: a tool call cannot be read")
    assert turn_sums(trajectory(turn([1], [2]), seeing(error))).result_turn == 1


def test_without_a_tool_there_is_no_result_turn() -> None:
    assert turn_sums(trajectory(seeing(user("<result>24</result>")))).result_turn == -1
    assert turn_sums(trajectory(stop=Stop.CONTEXT_OVERFLOW)) == (0.0, -1)
