"""Applies a reward to finished trajectories, and sums up what their turns earned."""

import math
from collections.abc import Sequence
from types import FunctionType
from typing import NamedTuple

from condensegrpo.errors import ScoreError
from condensegrpo.protocols import GroupReward, Problem, Reward, RewardResult
from condensegrpo.trajectory import TOOL_ATTEMPTS, TOOL_SUCCESSES, Score, ScoredTrajectory, Trajectory

COUNTS = frozenset({TOOL_ATTEMPTS, TOOL_SUCCESSES})  # entries of Turn.turn_rewards that count and pay nothing


class TurnSums(NamedTuple):
    """What the turns of a trajectory earned on the way."""

    total: float  # R^T: what environment and reward functions pay single turns; COUNTS are no rewards and stay out
    result_turn: int  # index among the act turns of the first whose observation carried a tool result; −1: none


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


def turn_sums(scored: ScoredTrajectory) -> TurnSums:
    """The turn rewards of a trajectory, summed, and where its first tool result came.

    R^T = Σ Score.turn_rewards + Σ Turn.turn_rewards, without ``COUNTS``. An error that answers a tool call is a result
    too: the policy saw what came of its call.

        turn 0: tool_attempts 2, tool_successes 1, hint 0.5; the score pays 0.2 and 0   ─▶   R^T = 0.7
    """
    turns = scored.trajectory.turns
    rewards = [value for turn in turns for name, value in turn.turn_rewards.items() if name not in COUNTS]
    acts = (turn for turn in turns if turn.kind == "act")
    answered = (
        at for at, turn in enumerate(acts) if any(message.tool_call_id is not None for message in turn.observations)
    )
    return TurnSums(total=math.fsum([*rewards, *scored.score.turn_rewards]), result_turn=next(answered, -1))


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
