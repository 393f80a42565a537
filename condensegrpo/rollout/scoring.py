"""Applies a reward to finished trajectories."""

import math
from collections.abc import Sequence
from types import FunctionType

from condensegrpo.core.errors import ScoreError
from condensegrpo.core.protocols import GroupReward, Problem, Reward, RewardResult
from condensegrpo.core.trajectory import Score, Trajectory


def score(trajectory: Trajectory, problem: Problem, reward: Reward) -> Score:
    """The score of a trajectory under a reward.

    A reward that gives a mapping is the sum of it; its entries ``format`` and ``correct`` are then the judgements.
    Where a reward does not judge, plain rules do: well formed is what stopped with an answer, right is a total of at
    least 1.

        {"correct": 1.0, "brevity": 0.2}   ─▶   total 1.2, correct 1.0, format_valid by the stop reason

    Raises:
        ScoreError: the reward raised; a total, a part, a judgement or a turn reward is not a finite number; or there
            are turn rewards and not one a turn.
    """
    try:
        result = RewardResult.of(reward(trajectory, problem))
    except Exception as error:  # the boundary to a plug-in
        raise ScoreError(f"{_doing(trajectory, problem, reward)}: {type(error).__name__}: {error}") from error
    return _checked(result, trajectory, _doing(trajectory, problem, reward))


def score_group(trajectories: Sequence[Trajectory], problem: Problem, reward: GroupReward) -> tuple[Score, ...]:
    """The scores of the trajectories of one group, in their order; what holds for ``score`` holds for each of them.

    Raises:
        ScoreError: as ``score``, or there is not one result a trajectory.
    """
    group = ", ".join(dict.fromkeys(one.group_id for one in trajectories))
    doing = f"scoring the {len(trajectories)} trajectories of group {group} with the reward {_name(reward)}"
    try:
        results = [RewardResult.of(given) for given in reward.score_group(trajectories, problem)]
    except Exception as error:  # the boundary to a plug-in
        raise ScoreError(f"{doing}: {type(error).__name__}: {error}") from error
    if len(results) != len(trajectories):
        raise ScoreError(
            f"{doing}: found {len(results)} results, wanted one a trajectory in their order; correct the reward"
        )
    return tuple(
        _checked(result, one, _doing(one, problem, reward)) for result, one in zip(results, trajectories, strict=True)
    )


def _checked(result: RewardResult, trajectory: Trajectory, doing: str) -> Score:
    """The score that a result makes, with plain rules where it does not judge."""
    valid = trajectory.stop.gives_answer if result.format_valid is None else result.format_valid
    right = float(result.total >= 1) if result.correct is None else result.correct
    turns = {f"turn_rewards[{turn}]": value for turn, value in enumerate(result.turn_rewards)}
    for name, value in {**result.components, "total": result.total, "correct": right, **turns}.items():
        if not math.isfinite(value):
            raise ScoreError(
                f"{doing}: {name} is {value}, wanted a finite number. One such value would spoil the advantages of the "
                f"whole group; correct the reward"
            )
    if not 0 <= right <= 1:
        raise ScoreError(f"{doing}: correct is {right}, wanted a value in [0, 1]; correct the reward")
    if len(result.turn_rewards) not in (0, len(trajectory.turns)):
        raise ScoreError(
            f"{doing}: found {len(result.turn_rewards)} turn rewards for {len(trajectory.turns)} turns, wanted one a "
            f"turn, or none at all; correct the reward"
        )
    return Score(
        total=result.total,
        components=result.components,
        format_valid=valid,
        correct=right,
        context_tokens=trajectory.max_context_tokens,
        turn_rewards=result.turn_rewards,
    )


def _doing(trajectory: Trajectory, problem: Problem, reward: Reward | GroupReward) -> str:
    return f"scoring trajectory {trajectory.id} of problem {problem.id} with the reward {_name(reward)}"


def _name(reward: Reward | GroupReward) -> str:
    return reward.__name__ if isinstance(reward, FunctionType) else type(reward).__name__
