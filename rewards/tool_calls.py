"""The reward ``tool_calls``: the share of tool calls that worked, whatever the answer."""

from typing import Annotated

from annotated_types import Ge

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.matches import Match, Matcher
from condensegrpo.rewards.verdict import judge
from condensegrpo.sandbox.sandbox import Sandbox


class ToolCalls:
    """``weight`` times successes/attempts over all turns; 0 for a trajectory that called no tool.

    Whether the answer is right is reported, not paid; a problem without ground truth is then an error, unless
    ``match`` is None.
    """

    def __init__(
        self,
        *,
        weight: Annotated[float, Ge(0)] = 1.0,
        match: Match | None = "exact",
        sandbox: Sandbox | None = None,
    ) -> None:
        self._weight = weight
        self._matcher = None if match is None else Matcher(match, sandbox)

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        valid, right = judge(trajectory, problem, self._matcher)
        attempts = sum(turn.tool_attempts for turn in trajectory.turns)
        successes = sum(turn.tool_successes for turn in trajectory.turns)
        total = self._weight * successes / attempts if attempts else 0.0
        return RewardResult(total=total, components={"tool_calls": total}, format_valid=valid, correct=right)
