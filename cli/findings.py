"""Findings of ``condensegrpo doctor``: what one check saw, and what to do about it."""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

GIB = 1 << 30


class Level(StrEnum):
    """How serious a finding is."""

    OK = "ok"  # nothing to do
    WARNING = "warning"  # works, but slowly or not for every use
    PROBLEM = "problem"  # a run will fail


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    area: str
    found: str
    cure: str = ""


ok, warning, problem = (partial(Finding, level) for level in Level)
