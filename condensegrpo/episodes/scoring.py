"""Applies a reward to finished trajectories. A reward that fails is the failure of the trajectory."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType

from condensegrpo.core.errors import ScoreError
from condensegrpo.core.failures import PluginFailure, failure_of
from condensegrpo.core.protocols.reward import GroupReward, Reward, RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Score, StopReason, Trajectory
from condensegrpo.core.wording import plural
from condensegrpo.episodes.failures import FAILURES


def score(trajectory: Trajectory, problem: Problem, reward: Reward) -> Score | PluginFailure:
    """The score of a trajectory under a reward.

    A number is the total. A mapping adds up to it; its entries ``format`` and ``correct`` are the judgements. If a
    reward does not judge, default rules apply: a trajectory that stopped with an answer is well formed, a total of at
    least 1 is correct.

        {"correct": 1.0, "brevity": 0.2}   ─▶   total 1.2, correct 1.0, format_valid by the stop reason

    Returns:
        The failure, if the reward raised; a total, a part, a judgement or a turn reward is not a finite number; or
        there are turn rewards but not one for each turn.
    """
    try:
        given = reward(trajectory, problem)
    except (Exception, SystemExit) as error:  # the boundary to a plug-in
        return failure_of(reward_name(reward), error, plugin=reward)
    return _score_of(given, trajectory, reward)


def score_group(
    trajectories: Sequence[Trajectory], problem: Problem, reward: GroupReward
) -> tuple[Score | PluginFailure, ...]:
    """The scores of the trajectories of one group, in their order, by the rules of ``score``.

    A result that is no reward is the failure of its own trajectory. If the reward raised, or did not return one result
    for each trajectory, all of them have failed.
    """
    try:
        given = list(reward.score_group(trajectories, problem))
        if len(given) != len(trajectories):
            raise ScoreError(
                f"returned {plural(len(given), 'result')} for "
                f"{plural(len(trajectories), 'trajectory', 'trajectories')}, wanted one for each"
            )
    except (Exception, SystemExit) as error:  # the boundary to a plug-in
        return (failure_of(reward_name(reward), error, plugin=reward),) * len(trajectories)
    return tuple(_score_of(result, each, reward) for result, each in zip(given, trajectories, strict=True))


def _score_of(given: object, trajectory: Trajectory, reward: Reward | GroupReward) -> Score | PluginFailure:
    """The score of what a reward returned."""
    try:
        return _checked(RewardResult.of(given), trajectory)
    except (Exception, SystemExit) as error:  # its numbers are objects of the plug-in: float() may raise anything
        return failure_of(reward_name(reward), error, plugin=reward)


def with_score(trajectory: Trajectory, outcome: Score | PluginFailure) -> ScoredTrajectory:
    """The trajectory with its score and figures. If the reward failed, it scores 0 and stops as ``reward_error``.

    A trajectory that had failed before, or was aborted, scores 0 whatever its reward says, and keeps that stop.
    """
    finished = trajectory.stop not in (*FAILURES, StopReason.ABORTED)
    if finished and isinstance(outcome, Score):
        return ScoredTrajectory.of(trajectory, outcome)
    nothing = Score(
        total=0.0, components={}, format_valid=False, correct=0.0, context_tokens=trajectory.max_context_tokens
    )
    if finished and isinstance(outcome, PluginFailure):
        trajectory = replace(
            trajectory, stop=StopReason.REWARD_ERROR, answer=None, detail=str(outcome), failure=outcome
        )
    return ScoredTrajectory.of(trajectory, nothing)


def reward_name(reward: Reward | GroupReward) -> str:
    """``the reward Brief``."""
    function = reward.func if isinstance(reward, partial) else reward
    return f"the reward {function.__name__ if isinstance(function, FunctionType) else type(function).__name__}"


def _checked(result: RewardResult, trajectory: Trajectory) -> Score:
    """The score of a result, with default rules where it does not judge."""
    format_valid = trajectory.stop.gives_answer if result.format_valid is None else result.format_valid
    correct = float(result.total >= 1) if result.correct is None else result.correct
    if not 0 <= correct <= 1 and math.isfinite(correct):  # NaN and infinity are refused, and named, by ``Score``
        raise ScoreError(f"returned correct = {correct}, wanted a number from 0 to 1")
    if len(result.turn_rewards) not in (0, len(trajectory.turns)):
        raise ScoreError(
            f"returned {plural(len(result.turn_rewards), 'turn reward')} for "
            f"{plural(len(trajectory.turns), 'turn')}, wanted one for each turn or none"
        )
    return Score(
        total=result.total,
        components=result.components,
        format_valid=format_valid,
        correct=correct,
        context_tokens=trajectory.max_context_tokens,
        turn_rewards=result.turn_rewards,
    )
