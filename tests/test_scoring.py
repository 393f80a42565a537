"""Applying a reward, to one trajectory or to a group, and what turns earned."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from builders import scored, trajectory, turn, user
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.algorithms.credit import TurnSums, turn_sums
from condensegrpo.core.errors import ScoreError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Score, Stop, Trajectory, Turn
from condensegrpo.rollout.scoring import score, score_group
from condensegrpo.rollout.toolcalls import TOOL_FORMATS

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
    found = paying(result)
    assert (found.total, found.correct, found.components) == (0.005, 1.0, {"inverse": 0.005})


def test_parts_named_format_and_correct_are_the_judgements() -> None:
    found = paying({"format": 0.0, "correct": 0.5, "bonus": 2.0})
    assert (found.total, found.format_valid, found.correct) == (2.5, False, 0.5)


def test_where_the_reward_does_not_judge_plain_rules_do() -> None:
    assert paying({"sum": 1.0}).correct == 1.0
    assert paying({"sum": 0.99}).correct == 0.0
    assert paying({"sum": 1.0}).format_valid
    assert not paying({"sum": 1.0}, replace(ONE, stop=Stop.FORMAT, answer=None)).format_valid
    assert paying(RewardResult(total=1.0)).correct == 1.0


def test_a_trajectory_without_turns_has_a_context_of_zero() -> None:
    assert paying({"sum": 0.0}, trajectory(stop=Stop.CONTEXT_OVERFLOW, answer=None)).context_tokens == 0


def test_whole_numbers_become_floats() -> None:
    found = paying({"correct": 1, "bonus": True})
    assert found.total == 2.0
    assert all(type(value) is float for value in (found.total, found.correct, *found.components.values()))


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
    found = RewardResult.of(
        RewardResult(total=1, components={"a": True}, format_valid=False, correct=0, turn_rewards=[0, True])  # type: ignore[arg-type]
    )
    assert found == RewardResult(
        total=1.0, components={"a": 1.0}, format_valid=False, correct=0.0, turn_rewards=(0.0, 1.0)
    )
    values = (found.total, found.correct, found.components["a"], *found.turn_rewards)
    assert [type(value) for value in values] == [float] * 5


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
    found = paying(parts)
    assert found.total == pytest.approx(sum(found.components.values()))


# --- turn rewards of a score ----------------------------------------------------------------------------------------


def test_turn_rewards_are_kept_beside_the_total_and_not_in_it() -> None:
    found = paying(RewardResult(total=1.0, components={"correct": 1.0, "steps": 0.75}, turn_rewards=(0.5, 0.25)))
    assert (found.total, found.turn_rewards) == (1.0, (0.5, 0.25))
    assert paying({"correct": 1.0}).turn_rewards == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_turn_reward_that_is_not_finite_names_trajectory_turn_and_value(value: float) -> None:
    with pytest.raises(ScoreError, match=rf"trajectory p0/3 .* reward fixed: turn_rewards\[1\] is {value}"):
        paying(RewardResult(total=1.0, turn_rewards=(0.5, value)))
    with pytest.raises(ValueError, match=rf"turn_rewards\[0\] is {value}, wanted a finite number"):
        replace(paying({}), turn_rewards=(value,))


@pytest.mark.parametrize("given", [(0.5,), (0.5, 0.5, 0.5)])
def test_turn_rewards_come_one_a_turn(given: tuple[float, ...]) -> None:
    wanted = f"p0/3 .* fixed: found {len(given)} turn rewards for 2 turns, wanted one for each turn or none"
    with pytest.raises(ScoreError, match=wanted):
        paying(RewardResult(total=1.0, turn_rewards=given))


def test_a_trajectory_without_turns_has_no_turn_to_pay() -> None:
    empty = trajectory(stop=Stop.CONTEXT_OVERFLOW, answer=None)
    assert paying(RewardResult(total=0.0), empty).turn_rewards == ()
    with pytest.raises(ScoreError, match="found 1 turn rewards for 0 turns"):
        paying(RewardResult(total=0.0, turn_rewards=(0.5,)), empty)


# --- groups ---------------------------------------------------------------------------------------------------------

GROUP = (
    trajectory(turn([1, 2, 3], [4]), id="p0/0"),
    trajectory(turn([1, 2], [4]), id="p0/1", stop=Stop.SAMPLER_ERROR, answer=None),
)


class Listed:
    """A group reward that always gives this."""

    def __init__(self, given: Sequence[Mapping[str, float] | RewardResult]) -> None:
        self._given = given

    def score_group(
        self, trajectories: Sequence[Trajectory], problem: Problem
    ) -> Sequence[Mapping[str, float] | RewardResult]:
        return self._given


class Ranked:
    """1 for the shortest context of the group, 0 for all others."""

    def score_group(self, trajectories: Sequence[Trajectory], problem: Problem) -> list[dict[str, float]]:
        shortest = min(one.max_context_tokens for one in trajectories)
        return [{"correct": float(one.max_context_tokens == shortest)} for one in trajectories]


def test_a_group_reward_sees_the_siblings() -> None:
    first, second = score_group(GROUP, PROBLEM, Ranked())
    assert (first.total, first.correct, first.context_tokens) == (0.0, 0.0, 3)
    assert (second.total, second.correct, second.context_tokens) == (1.0, 1.0, 2)
    (alone,) = score_group(GROUP[:1], PROBLEM, Ranked())
    assert alone.total == 1.0


def test_results_of_a_group_are_taken_as_those_of_one_trajectory() -> None:
    """Mapping or result, turn rewards, and plain rules where the reward does not judge."""
    first, second = score_group(GROUP, PROBLEM, Listed([RewardResult(total=1, turn_rewards=(0.5,)), {"sum": 0.5}]))
    assert first == Score(
        total=1.0, components={}, format_valid=True, correct=1.0, context_tokens=3, turn_rewards=(0.5,)
    )
    assert second == Score(total=0.5, components={"sum": 0.5}, format_valid=False, correct=0.0, context_tokens=2)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_group_reward_gives_one_result_a_trajectory(count: int) -> None:
    doing = "scoring the 2 trajectories of group p0 with the reward Listed"
    wanted = rf"{doing}: found {count} results, wanted one for each traj"
    with pytest.raises(ScoreError, match=wanted):
        score_group(GROUP, PROBLEM, Listed([{"sum": 1.0}] * count))


@pytest.mark.parametrize("given", [None, 1.0, {"sum": 1.0}, [1.0, 0.0]])
def test_a_group_reward_that_gives_no_results_is_named(given: object) -> None:
    with pytest.raises(ScoreError, match=r"2 trajectories of group p0 with the reward Listed: (Type|Attribute)Error"):
        score_group(GROUP, PROBLEM, Listed(given))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_of_a_group_that_is_not_finite_names_its_trajectory(value: float) -> None:
    """One NaN must not spoil the siblings' advantages: the sibling is named, not the group."""
    with pytest.raises(ScoreError, match=f"trajectory p0/1 of problem p0 with the reward Listed: bonus is {value}"):
        score_group(GROUP, PROBLEM, Listed([{"bonus": 1.0}, {"bonus": value}]))
    with pytest.raises(ScoreError, match=rf"trajectory p0/0 .* turn_rewards\[0\] is {value}"):
        score_group(GROUP, PROBLEM, Listed([RewardResult(total=1.0, turn_rewards=(value,)), {}]))
    with pytest.raises(ScoreError, match=r"trajectory p0/1 .* correct is 2.0, wanted a value in \[0, 1\]"):
        score_group(GROUP, PROBLEM, Listed([{}, {"correct": 2.0}]))


# --- turns ----------------------------------------------------------------------------------------------------------


def earning(**rewards: float) -> Turn:
    return replace(turn([1], [2]), turn_rewards=rewards)


def seeing(*observations: Message) -> Turn:
    return turn([1], [2], observations=observations)


def sums(*turns: Turn, paid: Sequence[float] = ()) -> TurnSums:
    return turn_sums(scored(trajectory(*turns), 1.0, turn_rewards=paid))


def test_turn_rewards_are_summed_over_turns_and_names() -> None:
    assert sums(earning(hint=-0.5, brief=0.25), earning(hint=1.0), turn([1], [2])).total == 0.75


def test_counts_of_tool_calls_are_no_rewards() -> None:
    called = replace(earning(hint=-0.5), tool_attempts=2, tool_successes=1)
    assert sums(called, replace(called, turn_rewards={})).total == -0.5


def test_what_environment_and_reward_pay_turns_adds_up() -> None:
    """R^T = (0.5 − 1) + (0.25 + 0.125): all of it, whoever pays it."""
    turns = (earning(hint=0.5), earning(hint=-1.0))
    assert sums(*turns, paid=(0.25, 0.125)).total == -0.125


@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 8)), max_size=5))
@settings(max_examples=50, deadline=None)
def test_it_does_not_matter_who_pays_a_turn(pays: list[tuple[int, int]]) -> None:
    by_both = sums(*[earning(hint=float(a)) for a, _ in pays], paid=[float(b) for _, b in pays])
    by_one = sums(*[earning(hint=float(a), more=float(b)) for a, b in pays])
    assert by_both == by_one


@pytest.mark.parametrize("tool_format", ["native", "tagged"])
def test_the_result_turn_is_the_first_that_a_tool_answered(tool_format: str) -> None:
    result = TOOL_FORMATS[tool_format].result("call_0", "calculator", "24")
    assert sums(seeing(user("go on")), seeing(result), seeing(result)).result_turn == 1
    assert sums(seeing(result), seeing(user("go on"))).result_turn == 0


def test_an_error_that_answers_a_call_is_a_result() -> None:
    error = TOOL_FORMATS["tagged"].result("call_0", "", "Error: a tool call cannot be read")
    assert sums(turn([1], [2]), seeing(error)).result_turn == 1


def test_without_a_tool_there_is_no_result_turn() -> None:
    assert sums(seeing(user("<result>24</result>"))).result_turn == -1
    assert sums() == (0.0, -1)
