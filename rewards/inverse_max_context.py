"""The reward ``inverse_max_context``: the reward of a right answer is inversely proportional to its largest context."""

from dataclasses import dataclass

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.context import Measure, context_tokens
from condensegrpo.rewards.matches import Match, Matcher
from condensegrpo.rewards.verdict import Domain, judge
from condensegrpo.sandbox.sandbox import Sandbox


@dataclass(kw_only=True, eq=False)
class InverseMaxContext:
    """0 if the format is invalid, 0 if the answer is wrong, else 1 / max(C, 1).

    C is the largest prompt of any turn, in tokens: a right answer under contexts of at most 200 tokens gives 0.005.
    Another ``measure`` takes the sum of all prompts or the last one. What a valid format is depends on the ``domain``
    and on ``min_last_reply_chars``, see ``verdict.format_valid``.
    """

    measure: Measure = "max"
    match: Match = "exact"
    sandbox: Sandbox | None = None
    domain: Domain = "general"
    min_last_reply_chars: int = 1

    def __post_init__(self) -> None:
        self._matcher = Matcher(self.match, self.sandbox)

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        least = self.min_last_reply_chars
        valid, right = judge(trajectory, problem, self._matcher, min_last_reply_chars=least, domain=self.domain)
        total = right / max(context_tokens(trajectory, self.measure), 1)
        return RewardResult(total=total, components={"inverse_max_context": total}, format_valid=valid, correct=right)
