"""Rewards: what a finished trajectory is worth, alone, beside its siblings, and turn by turn. Standard library only."""

import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, SupportsFloat

from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A reward with its parts. ``None`` leaves the judgement to the default rules of ``episodes.scoring.score``."""

    total: float  # of the outcome; turn rewards are not in it
    components: Mapping[str, float] = field(default_factory=dict)
    format_valid: bool | None = None
    correct: float | None = None  # in [0, 1]
    turn_rewards: tuple[float, ...] = ()  # (K,) what single turns are paid besides; () none

    @classmethod
    def of(cls, given: object) -> "RewardResult":
        """What a reward gave, in plain floats: a number, or a mapping and its sum; ``format`` and ``correct`` judge.

        {"correct": 1, "format": 0, "brevity": 0.2}   ─▶   total 1.2, correct 1.0, format_valid False
        """
        if isinstance(given, RewardResult):
            return cls(
                total=_number("total", given.total),
                components={name: _number(name, value) for name, value in given.components.items()},
                format_valid=given.format_valid,
                correct=None if given.correct is None else _number("correct", given.correct),
                turn_rewards=tuple(_number("a turn reward", value) for value in given.turn_rewards),
            )
        if isinstance(given, SupportsFloat):
            return cls(total=float(given))
        if not isinstance(given, Mapping):
            cure = ""
            if isinstance(given, Coroutine):
                given.close()
                cure = " Define it with def: it is a coroutine."
            raise TypeError(
                f'returned {given!r:.80}, wanted a number, numbers by name, as in return {{"brief": 1.0}}, or '
                f"a RewardResult.{cure}"
            )
        parts = {name: _number(name, value) for name, value in given.items()}
        return cls(
            total=sum(parts.values()),  # not fsum, which raises on inf − inf before the value can be named
            components=parts,
            format_valid=bool(parts["format"]) if "format" in parts else None,
            correct=parts.get("correct"),
        )


def _number(name: object, value: object) -> float:
    if not isinstance(name, str):
        raise TypeError(f'returned the name {name!r:.80}, wanted a text, as in return {{"brief": 1.0}}')
    if not isinstance(value, SupportsFloat):
        raise TypeError(f'returned {name} = {value!r:.80}, wanted a number, as in return {{"brief": 1.0}}')
    return float(value)


class Reward(Protocol):
    """What the outcome of a finished trajectory is worth: R^O. Several threads may call it at once. A function is one.

    A reward of any kind may have a method ``check_problem(problem)``, called before a run: it raises ValueError if no
    answer to a problem could be right.
    """

    def __call__(self, trajectory: Trajectory, problem: Problem) -> float | Mapping[str, float] | RewardResult:
        """The reward, or its parts by name (their sum is then the reward)."""


class GroupReward:
    """What finished trajectories are worth beside their siblings. The engine waits for the last one of a group."""

    def score_group(
        self, trajectories: Sequence[Trajectory], problem: Problem
    ) -> Sequence[float | Mapping[str, float] | RewardResult]:
        """The reward of every trajectory of one group, failed ones included, in the order given: by sample number."""
        raise NotImplementedError

    def check_problem(self, problem: Problem) -> None:
        """See ``Reward``."""


class TurnReward:
    """What the single turns of a finished trajectory are worth: its part of R^T. It says nothing of the outcome."""

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> Sequence[float]:
        """One number a turn."""
        raise NotImplementedError

    def check_problem(self, problem: Problem) -> None:
        """See ``Reward``."""


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
