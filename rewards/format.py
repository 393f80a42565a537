"""The reward ``format``: 1 for a well-formed trajectory, whatever its answer."""

from typing import Annotated

from annotated_types import Ge

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.matches import Match, Matcher
from condensegrpo.rewards.verdict import judge
from condensegrpo.sandbox.sandbox import Sandbox


class Format:
    """1 for a trajectory that ended with an answer and has no blank reply, else 0.

    Whether the answer is right is reported, not paid; a problem without ground truth is then an error, unless
    ``match`` is None.
    """

    def __init__(
        self,
        *,
        min_reply_chars: Annotated[int, Ge(1)] = 1,
        match: Match | None = "exact",
        sandbox: Sandbox | None = None,
    ) -> None:
        self._min_reply_chars = min_reply_chars
        self._matcher = None if match is None else Matcher(match, sandbox)

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        valid, right = judge(trajectory, problem, self._matcher, min_reply_chars=self._min_reply_chars)
        return RewardResult(total=float(valid), components={"format": float(valid)}, format_valid=valid, correct=right)
