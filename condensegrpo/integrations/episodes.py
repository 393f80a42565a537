"""What a log of another library holds of one episode."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import Stop

TEXT_ONLY = "text without token ids: token counts, log-probabilities and condensations are not known"


class LogFormat(StrEnum):
    """A library whose logs can be read."""

    TRL = "trl"
    VERIFIERS = "verifiers"
    INSPECT_AI = "inspect-ai"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEpisode:
    """One episode, in texts."""

    problem: str  # equal in all samples of one problem
    prompt: tuple[Message, ...]
    completion: tuple[Message, ...]
    rewards: Mapping[str, float]  # by name
    total: float
    correct: float
    step: int = 0  # optimiser step; 0: an evaluation
    advantage: float | None = None  # None: not in the log
    ground_truth: str | None = None
    answer: str | None = None
    stop: Stop = Stop.ANSWERED
    detail: str = ""
    seconds: float = 0.0


def numbers(values: Mapping[str, object] | None) -> dict[str, float]:
    """The finite numbers among some values, by name."""
    floats = {name: float(value) for name, value in (values or {}).items() if isinstance(value, int | float)}
    return {name: value for name, value in floats.items() if math.isfinite(value)}
