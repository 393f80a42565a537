"""Which rewards a configuration may name, alone and as parts; the others are refused before a model is loaded."""

from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from builders import trajectory, turn

from condensegrpo.assembly.build import build
from condensegrpo.assembly.components import Components
from condensegrpo.config.load import find_config, load_config
from condensegrpo.core.errors import ConfigError, PluginError
from condensegrpo.core.protocols.reward import GroupReward, RewardPart, RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.scoring import score_group
from condensegrpo.rewards.outcome import Correct
from condensegrpo.rewards.weighted_sum import WeightedSum


class Short:
    """A turn reward that inherits nothing."""

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> list[float]:
        return [0.5 for _ in trajectory.turns]


SEVEN = Problem(id="p0", question="3 + 4?", answer="7")
MINE = '''
class Brief:
    """A turn reward: half a point for a turn of few tokens."""

    def turn_rewards(self, trajectory, problem):
        return [0.5 * (len(turn.output_ids) <= 1) for turn in trajectory.turns]


class Shortest:
    """A group reward: a right answer in the fewest turns of the group."""

    def __init__(self, bonus=1.0):
        self.bonus = bonus

    def score_group(self, trajectories, problem):
        fewest = min(len(one.turns) for one in trajectories)
        return [{"shortest": self.bonus * (len(one.turns) == fewest), "correct": one.answer == problem.answer}
                for one in trajectories]


class Both:
    """Which is meant?"""

    def __call__(self, trajectory, problem):
        return {"sum": 1.0}

    def turn_rewards(self, trajectory, problem):
        return [0.0 for turn in trajectory.turns]


class Neither:
    """No reward at all."""
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def components(path: Path, reward: object) -> Components:
    """What a YAML file with this reward builds."""
    tree = yaml.safe_load(find_config("quickstart").read_text()) | {"reward": reward}
    (path / "mine.yaml").write_text(yaml.safe_dump(tree))
    return build(load_config(path / "mine.yaml"))


def parts(*each: dict[str, object]) -> dict[str, object]:
    return {"name": "weighted_sum", "options": {"parts": list(each)}}


def two_turns() -> Trajectory:
    return trajectory(turn([1], [2]), turn([1], [2, 3]), answer="7")


# --- what may be named ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("inverse_max_context", {"measure": "sum"}),
        ("inverse_scaled", {"reference_tokens": 64, "measure": "last"}),
        ("multiplicative", {"context_low": 16, "context_high": 64, "coefficient": 0.5}),
        ("linear_pass_rate", {"context_low": 16, "context_high": 64, "match": "number"}),
    ],
)
def test_the_context_rewards_can_be_named_with_their_options(
    tmp_path: Path, name: str, options: dict[str, object]
) -> None:
    built = components(tmp_path, {"name": name, "options": options}).reward
    assert isinstance(built, GroupReward) is (name == "linear_pass_rate")


def test_a_turn_reward_in_a_file_may_be_a_part(tmp_path: Path, mine: Path) -> None:
    brief = {"name": f"{mine}:Brief", "weight": 0.2}
    reward = components(tmp_path, parts({"name": "correct"}, brief, {"name": "tool_execution"})).reward
    assert callable(reward)
    result = reward(two_turns(), SEVEN)
    assert isinstance(result, RewardResult)
    assert (result.total, result.turn_rewards) == (1.0, (0.1, 0.0))  # 0.2 · 0.5 for the turn of one token
    assert result.components == {"correct": 1.0, "Brief": 0.1, "tool_execution": 0.0}


def test_a_group_reward_in_a_file_may_stand_alone(tmp_path: Path, mine: Path) -> None:
    reward = components(tmp_path, {"name": f"{mine}:Shortest", "options": {"bonus": 0.5}}).reward
    assert isinstance(reward, GroupReward)
    long, short = score_group([two_turns(), trajectory(turn([1], [2]), answer="8")], SEVEN, reward)
    assert (long.total, long.correct) == (1.0, 1.0)
    assert (short.total, short.correct) == (0.5, 0.0)


# --- what may not ---------------------------------------------------------------------------------------------------


def test_a_turn_reward_alone_is_told_where_it_belongs(tmp_path: Path, mine: Path) -> None:
    for name in ("tool_execution", f"{mine}:Brief"):
        with pytest.raises(
            ConfigError, match=r"says nothing of the outcome\. Make it a part of a weighted_sum"
        ) as caught:
            components(tmp_path, {"name": name})
        assert f"{{name: correct}}, {{name: {name!r}}}" in str(caught.value)


def test_turn_rewards_as_the_only_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="all of them pay single turns; add a part that pays the outcome"):
        components(tmp_path, parts({"name": "tool_execution"}))


def test_a_group_reward_as_a_part_is_told_to_stand_alone(tmp_path: Path, mine: Path) -> None:
    linear = {"name": "linear_pass_rate", "options": {"context_low": 16, "context_high": 64}}
    for one in (linear, {"name": f"{mine}:Shortest"}):
        with pytest.raises(ConfigError, match=f"scores a group as a whole.*Use it alone: reward.name={one['name']}"):
            components(tmp_path, parts({"name": "correct"}, one))


@pytest.mark.parametrize(
    ("name", "found"),
    [("Both", "Both has __call__ and turn_rewards"), ("Neither", "Neither has no method of a reward")],
)
def test_a_reward_is_of_exactly_one_kind(tmp_path: Path, mine: Path, name: str, found: str) -> None:
    for reward in ({"name": f"{mine}:{name}"}, parts({"name": "correct"}, {"name": f"{mine}:{name}"})):
        with pytest.raises(ConfigError, match=f"{found}, wanted exactly one of __call__, score_group, turn_rewards"):
            components(tmp_path, reward)


@pytest.mark.parametrize("weight", [-1.0, -1e-9, float("nan"), float("inf"), float("-inf"), "heavy"])
@pytest.mark.parametrize("name", ["correct", "tool_execution"])
def test_a_weight_that_is_negative_or_no_number_is_refused(tmp_path: Path, name: str, weight: object) -> None:
    with pytest.raises(ConfigError, match=rf"reading reward\.options\.parts\[1\]:\s+weight: found '?{weight}"):
        components(tmp_path, parts({"name": "format"}, {"name": name, "weight": weight}))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"name": "tool_calls", "options": {"weight": -0.1}}, "the option weight is -0.1"),
        ({"name": "inverse_scaled"}, "reference_tokens"),
        ({"name": "inverse_scaled", "options": {"reference_tokens": 0}}, "the option reference_tokens is 0"),
        ({"name": "inverse_max_context", "options": {"measure": "mean"}}, "the option measure is 'mean'"),
        ({"name": "multiplicative", "options": {"context_low": 9, "context_high": 3}}, "context_low=9"),
        (
            {"name": "linear_pass_rate", "options": {"context_low": 3, "context_high": 9, "coefficient": 2}},
            "the option coefficient is 2",
        ),
        ({"name": "linear_pass_rat"}, "Did you mean 'linear_pass_rate'"),
    ],
)
def test_options_that_make_no_sense_are_named(tmp_path: Path, reward: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        components(tmp_path, reward)


def test_a_sum_made_in_python_takes_turn_rewards_that_inherit_nothing() -> None:
    parts = [
        RewardPart(name="correct", weight=1, reward=Correct()),
        RewardPart(name="short", weight=1, reward=cast(Any, Short())),
    ]
    result = WeightedSum(parts=parts)(trajectory(turn([1], [2])), SEVEN)
    assert list(result.turn_rewards) == [0.5]
