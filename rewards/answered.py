"""The reward ``answered``: most for a right answer, a little for a wrong one, nothing for none."""

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.matches import Match, Matcher
from condensegrpo.rewards.verdict import judge
from condensegrpo.sandbox.sandbox import Sandbox


class Answered:
    """``right`` for a right answer, ``wrong`` for another one, 0 without an answer or with a blank reply."""

    def __init__(
        self, *, right: float = 1.0, wrong: float = 0.1, match: Match = "number", sandbox: Sandbox | None = None
    ) -> None:
        self._right = right
        self._wrong = wrong
        self._matcher = Matcher(match, sandbox)

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        valid, right = judge(trajectory, problem, self._matcher)
        total = (self._right if right else self._wrong) if valid else 0.0
        return RewardResult(total=total, components={"answered": total}, format_valid=valid, correct=right)
