"""The turn reward ``tool_execution``: every turn is paid for its tool calls that worked."""

from condensegrpo.core.protocols import Problem
from condensegrpo.core.trajectory import Trajectory


class ToolExecution:
    """(tool calls of this turn that worked) / (tool calls of the whole trajectory): a turn reward.

    Summed over the turns that is successes/attempts, what the reward ``tool_calls`` pays the outcome. All 0 where no
    tool was called.

        calls 2, 0, 2; worked 1, 0, 2   ─▶   0.25, 0, 0.5
    """

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> tuple[float, ...]:
        """One number a turn."""
        attempts = sum(turn.tool_attempts for turn in trajectory.turns)
        successes_K = (turn.tool_successes for turn in trajectory.turns)
        return tuple(successes / attempts if attempts else 0.0 for successes in successes_K)
