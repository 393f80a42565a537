"""The reward ``inverse_scaled``: as ``inverse_max_context``, in readable units."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.context import Measure, context_tokens
from condensegrpo.rewards.matches import Match, Matcher
from condensegrpo.rewards.verdict import judge
from condensegrpo.sandbox.sandbox import Sandbox


@dataclass(kw_only=True, eq=False)
class InverseScaled:
    """0 if the format is invalid, 0 if the answer is wrong, else min(1, C_ref / max(C, 1)).

    C is the context tokens by ``measure``, C_ref is ``reference_tokens``, below which there is nothing to gain: with
    C_ref = 100 a right answer gives 1 at 50 tokens, 1 at 100 and 0.25 at 400.
    """

    reference_tokens: Annotated[float, Gt(0)]
    measure: Measure = "max"
    match: Match = "exact"
    sandbox: Sandbox | None = None

    def __post_init__(self) -> None:
        self._matcher = Matcher(self.match, self.sandbox)

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        valid, right = judge(trajectory, problem, self._matcher)
        total = right * min(1.0, self.reference_tokens / max(context_tokens(trajectory, self.measure), 1))
        return RewardResult(total=total, components={"inverse_scaled": total}, format_valid=valid, correct=right)
