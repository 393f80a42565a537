"""Applies a reward to a finished trajectory, and sums up what its turns earned."""

import math
from types import FunctionType
from typing import NamedTuple

from condensegrpo.errors import ScoreError
from condensegrpo.protocols import Problem, Reward, RewardResult
from condensegrpo.trajectory import TOOL_ATTEMPTS, Score, Stop, Trajectory


class TurnSums(NamedTuple):
    """What the turns of a trajectory earned on the way."""

    total: float  # R^T: all turn rewards of all turns; TOOL_ATTEMPTS is a count, not a reward, and stays out
    result_turn: int  # index of the first turn whose observation carried a tool result; −1: none


def score(trajectory: Trajectory, problem: Problem, reward: Reward) -> Score:
    """The score of a trajectory under a reward.

    A reward that gives a mapping is the sum of it; its entries ``format`` and ``correct`` are then the judgements.
    Where a reward does not judge, plain rules do: well formed is what stopped with an answer, right is a total of at
    least 1.

        {"correct": 1.0, "brevity": 0.2}   ─▶   total 1.2, correct 1.0, format_valid by the stop reason

    Raises:
        ScoreError: the reward raised, or a total, a part or a judgement is not a finite number.
    """
    doing = f"scoring trajectory {trajectory.id} of problem {problem.id} with the reward {_name(reward)}"
    try:
        result = RewardResult.of(reward(trajectory, problem))
    except Exception as error:  # the boundary to a plug-in
        raise ScoreError(f"{doing}: {type(error).__name__}: {error}") from error
    valid = trajectory.stop is Stop.ANSWERED if result.format_valid is None else result.format_valid
    right = float(result.total >= 1) if result.correct is None else result.correct
    for name, value in {**result.components, "total": result.total, "correct": right}.items():
        if not math.isfinite(value):
            raise ScoreError(
                f"{doing}: {name} is {value}, wanted a finite number. One such value would spoil the advantages of the "
                f"whole group; correct the reward"
            )
    if not 0 <= right <= 1:
        raise ScoreError(f"{doing}: correct is {right}, wanted a value in [0, 1]; correct the reward")
    return Score(
        total=result.total,
        components=result.components,
        format_valid=valid,
        correct=right,
        context_tokens=trajectory.max_context_tokens,
    )


def turn_sums(trajectory: Trajectory) -> TurnSums:
    """The turn rewards of a trajectory, summed, and where its first tool result came.

    An error that answers a tool call is a result too: the policy saw what came of its call.
    """
    rewards = [value for turn in trajectory.turns for name, value in turn.turn_rewards.items() if name != TOOL_ATTEMPTS]
    answered = (
        at
        for at, turn in enumerate(trajectory.turns)
        if any(message.tool_call_id is not None for message in turn.observations)
    )
    return TurnSums(total=math.fsum(rewards), result_turn=next(answered, -1))


def _name(reward: Reward) -> str:
    return reward.__name__ if isinstance(reward, FunctionType) else type(reward).__name__
