"""Sums the turn rewards of a trajectory: R^T, and the turn of its first tool result."""

import math
from typing import NamedTuple

from condensegrpo.core.trajectory import ScoredTrajectory


class TurnSums(NamedTuple):
    """What the turns of a trajectory earned on the way."""

    total: float  # R^T: what environment and reward functions pay single turns
    result_turn: int  # index among the act turns of the first whose observation carried a tool result; −1: none


def turn_sums(scored: ScoredTrajectory) -> TurnSums:
    """The turn rewards of a trajectory, summed, and where its first tool result came.

    R^T = Σ Score.turn_rewards + Σ Turn.turn_rewards. An error that answers a tool call is a result
    too: the policy saw what came of its call.

        turn 0: hint 0.5; the score pays 0.2 and 0   ─▶   R^T = 0.7
    """
    turns = scored.trajectory.turns
    rewards = [value for turn in turns for value in turn.turn_rewards.values()]
    acts = (turn for turn in turns if turn.kind == "act")
    answered = (
        at for at, turn in enumerate(acts) if any(message.tool_call_id is not None for message in turn.observations)
    )
    return TurnSums(total=math.fsum([*rewards, *scored.score.turn_rewards]), result_turn=next(answered, -1))
