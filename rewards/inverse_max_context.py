"""The reward ``inverse_max_context``: the reward of a right answer is inversely proportional to its largest context."""

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.context import Measure, context_tokens
from condensegrpo.rewards.matches import Match, Matcher
from condensegrpo.rewards.verdict import Domain, judge
from condensegrpo.sandbox.sandbox import Sandbox


class InverseMaxContext:
    """0 if the format is invalid, 0 if the answer is wrong, else 1 / max(C, 1).

    C is the largest prompt of any turn, in tokens: a right answer under contexts of at most 200 tokens gives 0.005.
    Another ``measure`` takes the sum of all prompts or the last one. What a valid format is depends on the ``domain``
    and on ``min_last_reply_chars``, see ``verdict.format_valid``.
    """

    def __init__(
        self,
        *,
        measure: Measure = "max",
        match: Match = "exact",
        sandbox: Sandbox | None = None,
        domain: Domain = "general",
        min_last_reply_chars: int = 1,
    ) -> None:
        self._domain: Domain = domain
        self._min_last_reply_chars = min_last_reply_chars
        self._measure = measure
        self._matcher = Matcher(match, sandbox)

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        valid, right = judge(
            trajectory,
            problem,
            self._matcher,
            min_last_reply_chars=self._min_last_reply_chars,
            domain=self._domain,
        )
        total = right / max(context_tokens(trajectory, self._measure), 1)
        return RewardResult(total=total, components={"inverse_max_context": total}, format_valid=valid, correct=right)
