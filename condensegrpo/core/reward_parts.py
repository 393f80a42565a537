"""Rewards that are a weighted sum, and their parts. Standard library only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from condensegrpo.core.protocols.reward import Reward, TurnReward


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """One summand of a reward that is a weighted sum: of its total, or of its turn rewards."""

    name: str  # of its component in the breakdown
    weight: float  # finite, not negative
    reward: Reward | TurnReward

    def __post_init__(self) -> None:
        if isinstance(self.weight, bool) or not 0 <= self.weight < math.inf:
            raise ValueError(
                f"the weight of {self.name!r} is {self.weight}: wanted a finite number that is not negative"
            )


@runtime_checkable
class SumsParts(Protocol):
    """A reward whose total is the weighted sum of those of its parts."""

    @property
    def parts(self) -> Sequence[RewardPart]:
        """Its parts, turn rewards included."""
