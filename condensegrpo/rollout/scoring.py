"""Applies a reward to finished trajectories."""

from collections.abc import Sequence
from types import FunctionType

from condensegrpo.core.errors import ScoreError
from condensegrpo.core.protocols import GroupReward, Problem, Reward, RewardResult
from condensegrpo.core.trajectory import Score, Trajectory


def score(trajectory: Trajectory, problem: Problem, reward: Reward) -> Score:
    """The score of a trajectory under a reward.

    The total of a reward that returns a mapping is its sum; its entries ``format`` and ``correct`` are the judgements.
    If a reward does not judge, default rules apply: a trajectory that stopped with an answer is well formed, a total of
    at least 1 is correct.

        {"correct": 1.0, "brevity": 0.2}   ─▶   total 1.2, correct 1.0, format_valid by the stop reason

    Raises:
        ScoreError: the reward raised; a total, a part, a judgement or a turn reward is not a finite number; or there
            are turn rewards but not one for each turn.
    """
    try:
        result = RewardResult.of(reward(trajectory, problem))
    except Exception as error:  # the boundary to a plug-in
        raise ScoreError(f"{_doing(trajectory, problem, reward)}: {type(error).__name__}: {error}") from error
    return _checked(result, trajectory, _doing(trajectory, problem, reward))


def score_group(trajectories: Sequence[Trajectory], problem: Problem, reward: GroupReward) -> tuple[Score, ...]:
    """The scores of the trajectories of one group, in their order, by the rules of ``score``.

    Raises:
        ScoreError: as ``score``, or there is not one result for each trajectory.
    """
    group = ", ".join(dict.fromkeys(trajectory.group_id for trajectory in trajectories))
    doing = f"scoring the {len(trajectories)} trajectories of group {group} with the reward {_name(reward)}"
    try:
        results = [RewardResult.of(given) for given in reward.score_group(trajectories, problem)]
    except Exception as error:  # the boundary to a plug-in
        raise ScoreError(f"{doing}: {type(error).__name__}: {error}") from error
    if len(results) != len(trajectories):
        raise ScoreError(
            f"{doing}: found {len(results)} results, wanted one for each trajectory in their order; fix the reward"
        )
    return tuple(
        _checked(result, trajectory, _doing(trajectory, problem, reward))
        for result, trajectory in zip(results, trajectories, strict=True)
    )


def _checked(result: RewardResult, trajectory: Trajectory, doing: str) -> Score:
    """The score of a result, with default rules where it does not judge."""
    format_valid = trajectory.stop.gives_answer if result.format_valid is None else result.format_valid
    correct = float(result.total >= 1) if result.correct is None else result.correct
    try:
        checked = Score(
            total=result.total,
            components=result.components,
            format_valid=format_valid,
            correct=correct,
            context_tokens=trajectory.max_context_tokens,
            turn_rewards=result.turn_rewards,
        )
    except ValueError as error:
        raise ScoreError(
            f"{doing}: {error}. One such value would break the advantages of the whole group; fix the reward"
        ) from error
    if not 0 <= correct <= 1:
        raise ScoreError(f"{doing}: correct is {correct}, wanted a value in [0, 1]; fix the reward")
    if len(result.turn_rewards) not in (0, len(trajectory.turns)):
        raise ScoreError(
            f"{doing}: found {len(result.turn_rewards)} turn rewards for {len(trajectory.turns)} turns, wanted one "
            f"for each turn or none; fix the reward"
        )
    return checked


def _doing(trajectory: Trajectory, problem: Problem, reward: Reward | GroupReward) -> str:
    return f"scoring trajectory {trajectory.id} of problem {problem.id} with the reward {_name(reward)}"


def _name(reward: Reward | GroupReward) -> str:
    return reward.__name__ if isinstance(reward, FunctionType) else type(reward).__name__
