"""A weighted sum keeps outcome and turns apart, and its breakdown; the turn reward ``tool_execution``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from builders import scored, trajectory, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import PluginError
from condensegrpo.core.protocols.reward import Reward, RewardPart, RewardResult, TurnReward
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.scoring import score
from condensegrpo.rewards.context import InverseMaxContext
from condensegrpo.rewards.format import Format
from condensegrpo.rewards.outcome import Correct, ToolCalls
from condensegrpo.rewards.turns import ToolExecution
from condensegrpo.rewards.weighted_sum import WeightedSum

SEVEN = Problem(id="p0", question="3 + 4?", answer="7")


def answered(answer: str | None, *, contexts: Sequence[int] = (3,)) -> Trajectory:
    """A trajectory whose turns have prompts of so many tokens."""
    return trajectory(*(turn(range(length), [1]) for length in contexts), answer=answer)


def calling(*counts: tuple[int, int]) -> Trajectory:
    """A trajectory with the right answer whose turns tried so many tool calls, of which so many worked."""
    turns = [replace(turn([1], [2]), tool_attempts=tried, tool_successes=worked) for tried, worked in counts]
    return trajectory(*turns, turn([1], [2]), answer="7")


def part(name: str, reward: Reward | TurnReward, weight: float = 1.0) -> RewardPart:
    return RewardPart(name=name, weight=weight, reward=reward)


class Paying(TurnReward):
    """A turn reward that always gives these."""

    def __init__(self, *values: float) -> None:
        self._values = values

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> Sequence[float]:
        return self._values


# --- outcome --------------------------------------------------------------------------------------------------------


def test_a_weighted_sum_keeps_its_breakdown() -> None:
    reward = WeightedSum(
        parts=[
            part("correct", Correct(match="number"), 2.0),
            part("format", Format(), 0.5),
            part("inverse_max_context", InverseMaxContext(match="number"), 100.0),
        ]
    )
    result = reward(answered("7.0", contexts=(50,)), SEVEN)
    assert result.components == {"correct": 2.0, "format": 0.5, "inverse_max_context": 2.0}
    assert result.total == 4.5
    assert (result.format_valid, result.correct) == (True, 1.0)


def test_a_part_may_be_any_reward() -> None:
    def brevity(trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        return {"short": 0.25, "plain": 0.25}

    parts = [part("brevity", brevity, 2.0), part("correct", Correct())]
    result = WeightedSum(parts=parts)(answered("7"), SEVEN)
    assert result == RewardResult(
        total=2.0, components={"brevity": 1.0, "correct": 1.0}, format_valid=True, correct=1.0
    )
    alone = WeightedSum(parts=parts[:1])(answered("7"), SEVEN)
    assert (alone.format_valid, alone.correct) == (None, None)


@pytest.mark.parametrize(
    "given",
    [
        {"correct": 1, "format": 0},
        {"correct": 0.0, "format": 1.0},
        {"bonus": 0.25},
        RewardResult(total=1, correct=1, format_valid=False),
    ],
)
def test_a_part_judges_as_it_does_alone(given: Mapping[str, float] | RewardResult) -> None:
    def fixed(trajectory: Trajectory, problem: Problem) -> Mapping[str, float] | RewardResult:
        return given

    one = trajectory(turn([1], [2]), answer="7")
    alone = score(one, SEVEN, fixed)
    whole = score(one, SEVEN, WeightedSum(parts=[part("fixed", fixed, 0.5)]))
    assert (whole.correct, whole.format_valid) == (alone.correct, alone.format_valid)
    assert whole.total == 0.5 * alone.total


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf"), True])
def test_weights_must_be_finite_and_not_negative(weight: float) -> None:
    with pytest.raises(ValueError, match="the weight of 'correct' is"):
        part("correct", Correct(), weight)
    if weight is not True:
        with pytest.raises(PluginError, match="'tool_calls': the option weight is"):
            build_plugin("rewards", "tool_calls", {"weight": weight})


@pytest.mark.parametrize(("names", "message"), [([], "a weighted sum of nothing"), (["correct"] * 2, "each name once")])
def test_parts_that_make_no_sense_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightedSum(parts=[part(name, Correct()) for name in names])


# --- tool execution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "wanted"),
    [
        (calling((2, 1), (0, 0), (2, 2)), (0.25, 0.0, 0.5, 0.0)),  # 1/4, 0/4, 2/4, and the answer
        (calling((1, 0)), (0.0, 0.0)),
        (calling((0, 0)), (0.0, 0.0)),
        (calling(), (0.0,)),  # no turn has the counts
        (trajectory(stop=StopReason.SAMPLER_ERROR, answer=None), ()),
    ],
)
def test_tool_execution_pays_each_turn_its_share_of_all_calls(one: Trajectory, wanted: tuple[float, ...]) -> None:
    assert ToolExecution().turn_rewards(one, SEVEN) == wanted


@given(st.lists(st.integers(0, 5).flatmap(lambda tried: st.tuples(st.just(tried), st.integers(0, tried))), max_size=6))
@settings(max_examples=50)
def test_tool_execution_sums_to_what_tool_calls_pays_the_outcome(counts: list[tuple[int, int]]) -> None:
    one = calling(*counts)
    assert sum(ToolExecution().turn_rewards(one, SEVEN)) == pytest.approx(ToolCalls()(one, SEVEN).total)


def test_tool_execution_is_found_by_its_name_and_is_a_turn_reward_only() -> None:
    built = build_plugin("rewards", "tool_execution", {})
    assert isinstance(built, TurnReward)
    assert not callable(built)
    assert not isinstance(Correct(), TurnReward)


# --- turns ----------------------------------------------------------------------------------------------------------


def test_a_turn_reward_adds_to_the_turns_and_nothing_to_the_total() -> None:
    """The docstring's example: of two calls in turn 0 one worked, 0.2 · 1/2 = 0.1."""
    reward = WeightedSum(parts=[part("correct", Correct()), part("tool_execution", ToolExecution(), 0.2)])
    assert reward(calling((2, 1)), SEVEN) == RewardResult(
        total=1.0,
        components={"correct": 1.0, "tool_execution": 0.1},
        format_valid=True,
        correct=1.0,
        turn_rewards=(0.1, 0.0),
    )


def test_turn_rewards_of_all_parts_add_up_turn_by_turn() -> None:
    """2·(1, −1) + 0.5·(4, 8) + 3·(0.25, 0): what an outcome reward pays turns is weighted as the rest of it."""

    def both(trajectory: Trajectory, problem: Problem) -> RewardResult:
        return RewardResult(total=0.5, correct=1.0, turn_rewards=(0.25, 0.0))

    parts = [part("up", Paying(1, -1), 2.0), part("more", Paying(4, 8), 0.5), part("both", both, 3.0)]
    result = WeightedSum(parts=parts)(answered("7", contexts=(3, 3)), SEVEN)
    assert result.turn_rewards == (4.75, 2.0)
    assert result.components == {"up": 0.0, "more": 6.0, "both": 1.5}
    assert (result.total, result.correct) == (1.5, 1.0)


def test_outcome_and_turn_rewards_reach_the_credit_apart() -> None:
    """R^O = 1. R^T = 0.2 · 1/2 of the part + 0.5 of the environment; the tool calls are counted in neither."""
    reward = WeightedSum(parts=[part("correct", Correct()), part("tool_execution", ToolExecution(), 0.2)])
    called = replace(turn([1], [2]), tool_attempts=2, tool_successes=1, turn_rewards={"hint": 0.5})
    one = trajectory(called, turn([1], [2]), answer="7")
    found = ScoredTrajectory.of(one, score(one, SEVEN, reward))
    assert found.score.total == 1.0
    assert found.figures.turn_reward == pytest.approx(0.6)
    assert scored(one, 1.0).figures.turn_reward == 0.5


def test_without_a_turn_reward_no_turn_is_paid() -> None:
    assert WeightedSum(parts=[part("correct", Correct())])(answered("7"), SEVEN).turn_rewards == ()


def test_a_trajectory_without_turns_gets_nothing_from_a_turn_reward() -> None:
    reward = WeightedSum(parts=[part("correct", Correct()), part("tool_execution", ToolExecution())])
    result = reward(trajectory(stop=StopReason.SAMPLER_ERROR, answer=None), SEVEN)
    assert (result.total, result.turn_rewards, result.components["tool_execution"]) == (0.0, (), 0.0)


@pytest.mark.parametrize("values", [(), (1.0,), (1.0, 1.0, 1.0)])
def test_a_turn_reward_that_is_not_one_a_turn_names_its_part(values: tuple[float, ...]) -> None:
    reward = WeightedSum(parts=[part("correct", Correct()), part("steps", Paying(*values))])
    wanted = f"the part steps returned {len(values)} turn rewards for 2 turns, wanted one per turn"
    assert wanted in str(score(answered("7", contexts=(3, 3)), SEVEN, reward))


class Listless(TurnReward):
    """A turn reward that forgets to return anything."""

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> Sequence[float]:
        return None  # type: ignore[return-value]  # wrong on purpose


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_turn_reward_that_is_not_finite_names_part_and_value(value: float) -> None:
    reward = WeightedSum(parts=[part("correct", Correct()), part("steps", Paying(0.5, value))])
    found = score(answered("7", contexts=(3, 3)), SEVEN, reward)
    wanted = "a finite number of magnitude 1e+100 at most"
    assert str(found) == f"the reward WeightedSum: ValueError: steps is {value}, wanted {wanted}"


def test_parts_whose_infinities_would_cancel_are_found() -> None:
    def huge(trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        return {"huge": float("inf")}

    def deep(trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        return {"deep": float("-inf")}

    found = score(answered("7"), SEVEN, WeightedSum(parts=[part("huge", huge), part("deep", deep)]))
    assert "huge is inf" in str(found)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (part("steps", Listless()), "the part steps returned None, wanted a number for each turn, as in return [1.0, "),
        (
            part("one", lambda trajectory, problem: "good"),  # type: ignore[arg-type,return-value]  # wrong on purpose
            "the part one returned 'good', wanted a number, numbers by name, as in retur",
        ),
        (part("steps", Paying({"a": 1.0})), "the part steps returned {'a': 1.0} for a turn, wanted a number"),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_a_part_that_returns_the_wrong_thing_is_told_what_to_return(given: RewardPart, complaint: str) -> None:
    found = score(answered("7"), SEVEN, WeightedSum(parts=[part("correct", Correct()), given]))
    assert complaint in str(found)
    assert f"{Path(__file__).name}:" in str(found)


def test_turn_rewards_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="all of them pay single turns; add a part that pays the outcome"):
        WeightedSum(parts=[part("steps", Paying(1.0)), part("tools", ToolExecution())])
