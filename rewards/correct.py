"""The reward ``correct``: 1 for a right answer, else 0."""

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.matches import Match, Matcher
from condensegrpo.rewards.verdict import judge
from condensegrpo.sandbox.sandbox import Sandbox


class Correct:
    """1 for a right answer in a well-formed trajectory, else 0."""

    def __init__(self, *, match: Match = "exact", sandbox: Sandbox | None = None) -> None:
        self._matcher = Matcher(match, sandbox)

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        valid, right = judge(trajectory, problem, self._matcher)
        return RewardResult(total=right, components={"correct": right}, format_valid=valid, correct=right)
