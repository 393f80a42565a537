"""The reward ``correct``: 1 for a right answer, else 0."""

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.verdict import Match, check_match, judge


class Correct:
    """1 for a right answer in a well-formed trajectory, else 0."""

    def __init__(self, *, match: Match = "exact") -> None:
        check_match(match)
        self._match = match

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        valid, right = judge(trajectory, problem, match=self._match)
        return RewardResult(total=right, components={"correct": right}, format_valid=valid, correct=right)
