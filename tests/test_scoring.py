"""Applying a reward, to one trajectory or to a group, and what turns earned."""

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import scored, trajectory, turn, user
from formats import TOOL_FORMATS
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.algorithms.credit import result_turn
from condensegrpo.core.failures import PluginFailure
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.reward import GroupReward, RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Score, StopReason, Trajectory, Turn
from condensegrpo.core.wording import plural
from condensegrpo.episodes.scoring import score, score_group, with_score

PROBLEM = Problem(id="p0", question="3 + 4?", answer="7")
ONE = trajectory(turn([1, 2, 3], [4]), turn([1, 2, 3, 4, 5], [6]), id="p0/3")


def outcome(given: Any, one: Trajectory = ONE) -> Score | PluginFailure:
    """What comes of a reward that always gives this."""

    def fixed(trajectory: Trajectory, problem: Problem) -> Any:
        return given

    return score(one, PROBLEM, fixed)


def paying(given: Mapping[str, float] | RewardResult, one: Trajectory = ONE) -> Score:
    """The score under a reward that always gives this."""
    found = outcome(given, one)
    assert isinstance(found, Score), str(found)
    return found


def failing(found: Score | PluginFailure) -> str:
    """The message of a failure."""
    assert isinstance(found, PluginFailure)
    return str(found)


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
    assert not paying({"sum": 1.0}, replace(ONE, stop=StopReason.FORMAT, answer=None)).format_valid
    assert paying(RewardResult(total=1.0)).correct == 1.0


def test_a_trajectory_without_turns_has_a_context_of_zero() -> None:
    assert paying({"sum": 0.0}, trajectory(stop=StopReason.CONTEXT_OVERFLOW, answer=None)).context_tokens == 0


def test_whole_numbers_become_floats() -> None:
    found = paying({"correct": 1, "bonus": True})
    assert found.total == 2.0
    assert all(type(value) is float for value in (found.total, found.correct, *found.components.values()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_fails_by_name_and_value(value: float) -> None:
    assert f"the reward fixed: ValueError: bonus is {value}" in failing(outcome({"bonus": value, "correct": 1.0}))
    assert f"total is {value}" in failing(outcome(RewardResult(total=value, correct=1.0)))
    assert f"correct is {value}" in failing(outcome(RewardResult(total=1.0, correct=value)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": 1.0, 3: 1.0}, "TypeError: returned the name 3, wanted a text"),
        ({"x": 10**400}, "OverflowError: "),
        (RewardResult(total=1.0, components=None), "AttributeError: "),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_whatever_a_reward_returns_is_the_failure_of_one_trajectory_alone(given: object, message: str) -> None:
    assert f"the reward fixed: {message}" in failing(outcome(given))


def test_a_result_of_a_mapping_holds_its_sum_its_parts_and_its_judgements() -> None:
    assert RewardResult.of({"correct": 1, "format": 0, "brevity": 0.5}) == RewardResult(
        total=1.5, components={"correct": 1.0, "format": 0.0, "brevity": 0.5}, format_valid=False, correct=1.0
    )
    assert RewardResult.of({"brevity": 0.5}) == RewardResult(total=0.5, components={"brevity": 0.5})
    assert RewardResult.of({}) == RewardResult(total=0.0)


def test_a_result_of_a_result_is_the_same_in_floats() -> None:
    found = RewardResult.of(
        RewardResult(total=1, components={"a": True}, format_valid=False, correct=0, turn_rewards=[0, True])  # type: ignore[arg-type]  # wrong on purpose
    )
    assert found == RewardResult(
        total=1.0, components={"a": 1.0}, format_valid=False, correct=0.0, turn_rewards=(0.0, 1.0)
    )
    values = (found.total, found.correct, found.components["a"], *found.turn_rewards)
    assert [type(value) for value in values] == [float] * 5


def test_infinities_that_cancel_are_found() -> None:
    assert "plus is inf" in failing(outcome({"plus": float("inf"), "minus": float("-inf")}))


def test_correctness_outside_its_range_is_a_failure() -> None:
    assert "returned correct = 2.0, wanted a number from 0 to 1" in failing(outcome({"correct": 2.0}))


class Broken:
    """A reward that raises."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        raise KeyError("level")


class Silent:
    """A reward that gives nothing."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        return None  # type: ignore[return-value]  # wrong on purpose


def test_a_reward_that_raises_fails_with_the_line_that_raised() -> None:
    line = inspect.getsourcelines(Broken.__call__)[1] + 1
    found = score(ONE, PROBLEM, Broken())
    assert failing(found) == f"the reward Broken: KeyError: 'level' ({os.path.relpath(__file__)}:{line})"
    assert isinstance(found, PluginFailure)
    assert "Traceback" in found.traceback


def test_a_reward_that_raises_where_the_working_directory_was_removed_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a clone that is deleted while its run goes on."""

    def wrong(trajectory: Trajectory, problem: Problem) -> float:
        raise KeyError("price")

    gone = tmp_path / "clone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    failure = failing(score(ONE, PROBLEM, wrong))
    monkeypatch.chdir(tmp_path)  # pytest wants one
    assert "KeyError: 'price'" in failure
    assert f"{__file__}:" in failure


def test_a_reward_that_returns_nothing_is_told_what_to_return() -> None:
    line = inspect.getsourcelines(Silent)[1]
    message = (
        'TypeError: returned None, wanted a number, numbers by name, as in return {"brief": 1.0}, or a RewardResult'
    )
    assert failing(score(ONE, PROBLEM, Silent())) == f"the reward Silent: {message} (tests/test_scoring.py:{line})"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("good", "returned 'good', wanted a number, numbers by name"),
        ([1.0], "returned [1.0], wanted a number, numbers by name"),
        ({"brief": "1"}, "returned brief = '1', wanted a number"),
        ({"brief": None}, "returned brief = None, wanted a number"),
        (RewardResult(total=None), "returned total = None, wanted a number"),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_what_is_no_reward_is_told_what_to_return(given: object, complaint: str) -> None:
    assert complaint in failing(outcome(given))


@pytest.mark.parametrize(
    ("given", "total", "correct"), [(0.5, 0.5, 0.0), (1, 1.0, 1.0), (True, 1.0, 1.0), (-2.0, -2.0, 0.0)]
)
def test_a_number_is_the_total(given: float, total: float, correct: float) -> None:
    found = score(ONE, PROBLEM, lambda trajectory, problem: given)
    assert isinstance(found, Score)
    assert (found.total, found.components, found.correct) == (total, {}, correct)


def test_an_asynchronous_reward_is_told_to_be_a_plain_function() -> None:
    async def later(trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        return {"brief": 1.0}

    found = failing(score(ONE, PROBLEM, later))  # type: ignore[arg-type]  # wrong on purpose
    assert "Define it with def: it is a coroutine" in found


@pytest.mark.parametrize("error", [SystemExit(3), RecursionError(), MemoryError("full")])
def test_an_exit_of_a_reward_is_its_failure(error: BaseException) -> None:
    def exits(trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        raise error

    assert type(error).__name__ in failing(score(ONE, PROBLEM, exits))


def test_a_failed_reward_ends_its_trajectory_unless_something_failed_before() -> None:
    failure = PluginFailure(source="the reward Broken", error="KeyError", message="'level'", location="mine.py:3")
    found = with_score(ONE, failure)
    assert (found.trajectory.stop, found.trajectory.answer) == (StopReason.REWARD_ERROR, None)
    assert found.trajectory.detail == "the reward Broken: KeyError: 'level' (mine.py:3)"
    assert (found.score.total, found.score.correct, found.score.format_valid) == (0.0, 0.0, False)
    first = PluginFailure(source="the environment", error="OSError", message="no such world")
    before = replace(ONE, stop=StopReason.ENVIRONMENT_ERROR, answer=None, failure=first)
    assert with_score(before, failure).trajectory == before
    stopped = replace(ONE, stop=StopReason.ABORTED, answer=None)
    assert with_score(stopped, failure).trajectory == stopped


def test_a_trajectory_that_failed_is_no_success_whatever_its_reward_pays() -> None:
    failure = PluginFailure(source="the environment", error="OSError", message="no such world")
    for failed in (
        replace(ONE, stop=StopReason.ENVIRONMENT_ERROR, answer=None, failure=failure),
        replace(ONE, stop=StopReason.ENVIRONMENT_ERROR, answer=None, detail="the condenser asked twice"),
        replace(ONE, stop=StopReason.ABORTED, answer=None),
    ):
        found = with_score(failed, paying({"short": 1.0}, failed))
        assert found.trajectory == failed
        assert (found.score.total, found.score.correct, found.score.format_valid) == (0.0, 0.0, False)


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(-100, 100), max_size=6))
@settings(max_examples=50)
def test_the_breakdown_accounts_for_the_total(parts: dict[str, float]) -> None:
    found = paying(parts)
    assert found.total == pytest.approx(sum(found.components.values()))


# --- turn rewards of a score ----------------------------------------------------------------------------------------


def test_turn_rewards_are_kept_beside_the_total_and_not_in_it() -> None:
    found = paying(RewardResult(total=1.0, components={"correct": 1.0, "steps": 0.75}, turn_rewards=(0.5, 0.25)))
    assert (found.total, found.turn_rewards) == (1.0, (0.5, 0.25))
    assert paying({"correct": 1.0}).turn_rewards == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_turn_reward_that_is_not_finite_names_turn_and_value(value: float) -> None:
    assert f"turn_rewards[1] is {value}" in failing(outcome(RewardResult(total=1.0, turn_rewards=(0.5, value))))
    with pytest.raises(ValueError, match=rf"turn_rewards\[0\] is {value}, wanted a finite number"):
        replace(paying({}), turn_rewards=(value,))


def test_turn_rewards_whose_sum_would_overflow_are_the_failure_of_their_trajectory() -> None:
    assert "turn_rewards[0] is 1e+308" in failing(outcome(RewardResult(total=1.0, turn_rewards=(1e308, 1e308))))


@pytest.mark.parametrize("given", [(0.5,), (0.5, 0.5, 0.5)])
def test_turn_rewards_come_one_a_turn(given: tuple[float, ...]) -> None:
    wanted = (
        f"the reward fixed: ScoreError: returned {plural(len(given), 'turn reward')} for 2 turns, wanted one for each"
    )
    assert wanted in failing(outcome(RewardResult(total=1.0, turn_rewards=given)))


def test_a_trajectory_without_turns_has_no_turn_to_pay() -> None:
    empty = trajectory(stop=StopReason.CONTEXT_OVERFLOW, answer=None)
    assert paying(RewardResult(total=0.0), empty).turn_rewards == ()
    assert "returned 1 turn reward for 0 turns" in failing(outcome(RewardResult(total=0.0, turn_rewards=(0.5,)), empty))


# --- groups ---------------------------------------------------------------------------------------------------------

GROUP = (
    trajectory(turn([1, 2, 3], [4]), id="p0/0"),
    trajectory(turn([1, 2], [4]), id="p0/1", stop=StopReason.SAMPLER_ERROR, answer=None),
)


class Listed(GroupReward):
    """A group reward that always gives this."""

    def __init__(self, given: Sequence[Mapping[str, float] | RewardResult]) -> None:
        self._given = given

    def score_group(
        self, trajectories: Sequence[Trajectory], problem: Problem
    ) -> Sequence[Mapping[str, float] | RewardResult]:
        return self._given


class Ranked(GroupReward):
    """1 for the shortest context of the group, 0 for all others."""

    def score_group(self, trajectories: Sequence[Trajectory], problem: Problem) -> list[dict[str, float]]:
        shortest = min(one.max_context_tokens for one in trajectories)
        return [{"correct": float(one.max_context_tokens == shortest)} for one in trajectories]


def paid_together(group: Sequence[Trajectory], reward: GroupReward) -> list[Score]:
    scores = [found for found in score_group(group, PROBLEM, reward) if isinstance(found, Score)]
    assert len(scores) == len(group)
    return scores


def test_a_group_reward_sees_the_siblings() -> None:
    first, second = paid_together(GROUP, Ranked())
    assert (first.total, first.correct, first.context_tokens) == (0.0, 0.0, 3)
    assert (second.total, second.correct, second.context_tokens) == (1.0, 1.0, 2)
    (alone,) = paid_together(GROUP[:1], Ranked())
    assert alone.total == 1.0


def test_results_of_a_group_are_taken_as_those_of_one_trajectory() -> None:
    """Mapping or result, turn rewards, and plain rules where the reward does not judge."""
    first, second = paid_together(GROUP, Listed([RewardResult(total=1, turn_rewards=(0.5,)), {"sum": 0.5}]))
    assert first == Score(
        total=1.0, components={}, format_valid=True, correct=1.0, context_tokens=3, turn_rewards=(0.5,)
    )
    assert second == Score(total=0.5, components={"sum": 0.5}, format_valid=False, correct=0.0, context_tokens=2)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_group_reward_gives_one_result_a_trajectory(count: int) -> None:
    wanted = (
        f"the reward Listed: ScoreError: returned {plural(count, 'result')} for 2 trajectories, wanted one for each"
    )
    results = score_group(GROUP, PROBLEM, Listed([{"sum": 1.0}] * count))
    assert len(results) == len(GROUP)
    for found in results:
        assert wanted in failing(found)


@pytest.mark.parametrize("given", [None, 1.0, {"sum": 1.0}, ["good", None]])
def test_a_group_reward_that_gives_no_results_fails_in_every_trajectory(given: object) -> None:
    for found in score_group(GROUP, PROBLEM, Listed(given)):  # type: ignore[arg-type]  # wrong on purpose
        assert failing(found).startswith(("the reward Listed: TypeError", "the reward Listed: ScoreError"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_of_a_group_that_is_not_finite_is_the_failure_of_its_own_trajectory(value: float) -> None:
    """One NaN must not spoil the siblings' advantages."""
    fine, bad = score_group(GROUP, PROBLEM, Listed([{"bonus": 1.0}, {"bonus": value}]))
    assert isinstance(fine, Score)
    assert f"bonus is {value}" in failing(bad)
    bad, fine = score_group(GROUP, PROBLEM, Listed([RewardResult(total=1.0, turn_rewards=(value,)), {}]))
    assert f"turn_rewards[0] is {value}" in failing(bad)
    assert isinstance(fine, Score)


# --- turns ----------------------------------------------------------------------------------------------------------


def earning(**rewards: float) -> Turn:
    return replace(turn([1], [2]), turn_rewards=rewards)


def seeing(*observations: Message) -> Turn:
    return turn([1], [2], observations=observations)


def earned(*turns: Turn, paid: Sequence[float] = ()) -> float:
    return scored(trajectory(*turns), 1.0, turn_rewards=paid).figures.turn_reward


def test_turn_rewards_are_summed_over_turns_and_names() -> None:
    assert earned(earning(hint=-0.5, brief=0.25), earning(hint=1.0), turn([1], [2])) == 0.75


def test_counts_of_tool_calls_are_no_rewards() -> None:
    called = replace(earning(hint=-0.5), tool_attempts=2, tool_successes=1)
    assert earned(called, replace(called, turn_rewards={})) == -0.5


def test_what_environment_and_reward_pay_turns_adds_up() -> None:
    """R^T = (0.5 − 1) + (0.25 + 0.125): all of it, whoever pays it."""
    turns = (earning(hint=0.5), earning(hint=-1.0))
    assert earned(*turns, paid=(0.25, 0.125)) == -0.125


@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 8)), max_size=5))
@settings(max_examples=50)
def test_it_does_not_matter_who_pays_a_turn(pays: list[tuple[int, int]]) -> None:
    by_both = earned(*[earning(hint=float(a)) for a, _ in pays], paid=[float(b) for _, b in pays])
    by_one = earned(*[earning(hint=float(a), more=float(b)) for a, b in pays])
    assert by_both == by_one


@pytest.mark.parametrize("tool_format", ["native", "tagged"])
def test_the_result_turn_is_the_first_that_a_tool_answered(tool_format: str) -> None:
    result = TOOL_FORMATS[tool_format].result("call_0", "calculator", "24")
    assert result_turn(trajectory(seeing(user("go on")), seeing(result), seeing(result))) == 1
    assert result_turn(trajectory(seeing(result), seeing(user("go on")))) == 0


def test_an_error_that_answers_a_call_is_a_result() -> None:
    error = TOOL_FORMATS["tagged"].result("call_0", "", "Error: a tool call cannot be read")
    assert result_turn(trajectory(turn([1], [2]), seeing(error))) == 1


def test_without_a_tool_there_is_no_result_turn() -> None:
    assert result_turn(trajectory(seeing(user("<result>24</result>")))) == -1
    assert (earned(), result_turn(trajectory())) == (0.0, -1)
