"""The reward ``multiplicative``: a larger context takes a larger share of the reward of a right answer."""

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.context import TaxedReward
from condensegrpo.rewards.verdict import judge


class Multiplicative(TaxedReward):
    """r·(1 − λu), with u the logarithm of the context between two anchors (see ``TaxedReward``).

    r is 1 for a right answer in a well-formed trajectory, else 0. With λ = 0.4, C_lo = 100 and C_hi = 400 a right
    answer gives 1 up to 100 tokens, 0.8 at 200, and 0.6 from 400 on. λ < 1 keeps every right answer above every wrong
    one.
    """

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        valid, right = judge(trajectory, problem, self._matcher)
        total = right * (1 - self.tax(trajectory))
        return RewardResult(total=total, components={"multiplicative": total}, format_valid=valid, correct=right)
