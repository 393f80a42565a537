"""Rewards of a right answer by the context that it took."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from condensegrpo.core.protocols.reward import GroupReward, RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.matches import Match
from condensegrpo.rewards.outcome import Domain, JudgingReward, judge_trajectory

Measure = Literal["max", "sum", "last"]


def context_tokens(trajectory: Trajectory, measure: Measure) -> int:
    """C, the context tokens of a trajectory; 0 without turns.

    ``max`` must fit into memory, ``sum`` is the total that was read, ``last`` the final prompt.

        prompts of 10, 40 and 25 tokens   ─▶   max 40   sum 75   last 25
    """
    prompts_K = [len(turn.prompt_ids) for turn in trajectory.turns] or [0]
    if measure == "last":
        return prompts_K[-1]
    return sum(prompts_K) if measure == "sum" else max(prompts_K)


@dataclass(kw_only=True, eq=False)
class ContextReward(JudgingReward):
    """Options of the rewards that depend on the context C of a trajectory, in tokens by ``measure``."""

    measure: Measure = "max"
    match: Match = "exact"

    def context(self, trajectory: Trajectory) -> int:
        """C, at least 1."""
        return max(context_tokens(trajectory, self.measure), 1)


@dataclass(kw_only=True, eq=False)
class InverseMaxContext(ContextReward):
    """0 if the format is invalid, 0 if the answer is wrong, else 1 / max(C, 1).

    C is the largest prompt of any turn, in tokens: a right answer under contexts of at most 200 tokens gives 0.005.
    Another ``measure`` takes the sum of all prompts or the last one. A valid format depends on the ``domain`` and
    on ``min_last_reply_chars``, see ``outcome.format_valid``.
    """

    domain: Domain = "general"
    min_last_reply_chars: int = 1

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        least = self.min_last_reply_chars
        verdict = judge_trajectory(trajectory, problem, self._matcher, min_last_reply_chars=least, domain=self.domain)
        return verdict.result("inverse_max_context", verdict.correct / self.context(trajectory))


@dataclass(kw_only=True, eq=False)
class InverseScaled(ContextReward):
    """0 if the format is invalid, 0 if the answer is wrong, else min(1, C_ref / max(C, 1)).

    C is the context tokens by ``measure``, C_ref is ``reference_tokens``, below which there is nothing to gain: with
    C_ref = 100 a right answer gives 1 at 50 tokens, 1 at 100 and 0.25 at 400.
    """

    reference_tokens: Annotated[float, Gt(0)]

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        verdict = judge_trajectory(trajectory, problem, self._matcher)
        worth = min(1.0, self.reference_tokens / self.context(trajectory))
        return verdict.result("inverse_scaled", verdict.correct * worth)


@dataclass(kw_only=True, eq=False)
class TaxedReward(ContextReward):
    """Options of the rewards that tax the context by λ·u; u = clip(ln(C/C_lo) / ln(C_hi/C_lo), 0, 1).

    0 up to C_lo, λ from C_hi on, and the same increase for every doubling between them. With λ = 0.4, C_lo = 100 and
    C_hi = 400: 100 tokens take 0, 200 take 0.2, 400 and more take 0.4.
    """

    context_low: Annotated[float, Gt(0)]  # C_lo, tokens
    context_high: Annotated[float, Gt(0)]  # C_hi, tokens
    coefficient: Annotated[float, Ge(0), Le(1)] = 0.2  # λ

    def __post_init__(self) -> None:
        if not self.context_low < self.context_high:
            raise ValueError(
                f"context_low={self.context_low} and context_high={self.context_high}: wanted context_low < "
                f"context_high"
            )
        super().__post_init__()

    def tax(self, trajectory: Trajectory) -> float:
        """The fraction of the reward that the context of a trajectory takes, in [0, λ]."""
        clipped = min(max(self.context(trajectory), self.context_low), self.context_high)
        return self.coefficient * math.log(clipped / self.context_low) / math.log(self.context_high / self.context_low)


class Multiplicative(TaxedReward):
    """r·(1 − λu), with u the logarithm of the context between two anchors (see ``TaxedReward``).

    r is 1 for a right answer in a well-formed trajectory, else 0. With λ = 0.4, C_lo = 100 and C_hi = 400 a right
    answer gives 1 up to 100 tokens, 0.8 at 200, and 0.6 from 400 on. λ < 1 keeps every right answer above every wrong
    one.
    """

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        verdict = judge_trajectory(trajectory, problem, self._matcher)
        return verdict.result("multiplicative", verdict.correct * (1 - self.tax(trajectory)))


class LinearPassRate(TaxedReward, GroupReward):
    """r·(1 − λ·p·u), with p the fraction of the group that is right: a group reward.

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
        verdicts = [judge_trajectory(trajectory, problem, self._matcher) for trajectory in trajectories]
        pass_rate = fmean(verdict.correct for verdict in verdicts)
        return [
            verdict.result("linear_pass_rate", verdict.correct * (1 - pass_rate * self.tax(trajectory)))
            for trajectory, verdict in zip(trajectories, verdicts, strict=True)
        ]
