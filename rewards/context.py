"""How the context of a trajectory is measured and taxed: shared by the context-efficiency rewards."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.matches import Match, Matcher
from condensegrpo.sandbox.sandbox import Sandbox

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
class TaxedReward:
    """Options of the rewards that tax the context by λ·u; u = clip(ln(C/C_lo) / ln(C_hi/C_lo), 0, 1).

    0 up to C_lo, λ from C_hi on, and the same increase for every doubling between them. With λ = 0.4, C_lo = 100 and
    C_hi = 400: 100 tokens take 0, 200 take 0.2, 400 and more take 0.4.
    """

    context_low: Annotated[float, Gt(0)]  # C_lo, tokens
    context_high: Annotated[float, Gt(0)]  # C_hi, tokens
    coefficient: Annotated[float, Ge(0), Le(1)] = 0.2  # λ
    measure: Measure = "max"
    match: Match = "exact"
    sandbox: Sandbox | None = None

    def __post_init__(self) -> None:
        if not self.context_low < self.context_high:
            raise ValueError(
                f"context_low={self.context_low} and context_high={self.context_high}: wanted context_low < "
                f"context_high"
            )
        self._matcher = Matcher(self.match, self.sandbox)

    def tax(self, trajectory: Trajectory) -> float:
        """The share of the reward that the context of a trajectory takes, in [0, λ]."""
        context = max(context_tokens(trajectory, self.measure), 1)
        clipped = min(max(context, self.context_low), self.context_high)
        return self.coefficient * math.log(clipped / self.context_low) / math.log(self.context_high / self.context_low)
