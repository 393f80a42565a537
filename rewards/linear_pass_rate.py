"""The reward ``linear_pass_rate``: context is taxed in proportion to how easily a question is solved."""

from collections.abc import Sequence
from statistics import fmean

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.context import TaxedReward
from condensegrpo.rewards.verdict import judge


class LinearPassRate(TaxedReward):
    """r·(1 − λ·p·u), with p the share of the group that is right: a group reward.

    r is 1 for a right answer in a well-formed trajectory, else 0; u is the logarithm of the context between two anchors
    (see ``TaxedReward``). A question that one of four solves pays a quarter of the tax that one pays that all solve. So
    hard questions may take the context they need. The idea is that of the adaptive length penalty of "Just Enough
    Thinking" (https://arxiv.org/abs/2506.05256), which subtracts β·tokens·p of the reply from the reward.

    With λ = 0.4, C_lo = 100, C_hi = 400 and a context of 400 tokens a right answer gives 0.6 where all are right and
    0.9 where a quarter is. A trajectory that failed or has no answer counts as wrong in p. A group of one
    has p = r.
    """

    def score_group(self, trajectories: Sequence[Trajectory], problem: Problem) -> list[RewardResult]:
        """The reward of every trajectory of a group."""
        verdicts = [judge(trajectory, problem, self._matcher) for trajectory in trajectories]
        pass_rate = fmean(verdict.correct for verdict in verdicts)
        results = []
        for trajectory, (valid, right) in zip(trajectories, verdicts, strict=True):
            total = right * (1 - pass_rate * self.tax(trajectory))
            results.append(
                RewardResult(total=total, components={"linear_pass_rate": total}, format_valid=valid, correct=right)
            )
        return results
