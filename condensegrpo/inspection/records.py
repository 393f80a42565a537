"""The figures of one trajectory, as the index keeps them, and of the trajectories of one problem in one step."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

from condensegrpo.algorithms.turn_facts import TRUNCATED
from condensegrpo.inspection.filters import FIELDS, Fields
from condensegrpo.storage.credit import Credit


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePlace:
    """Where a trajectory is stored."""

    file: Path
    line: int  # from 1
    start: int  # of the line in the file, in bytes
    size: int  # of the line in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRecord:
    """The figures of one trajectory."""

    number: int  # its place in the file by groups and samples, from 0; --trajectory takes it
    id: str
    group: str
    sample: int
    problem: str
    question: str | None  # None: not known
    ground_truth: str | None  # None: there is no answer in text, or it is not known
    score: float
    correct: float
    format: bool
    components: Mapping[str, float]
    advantages: tuple[float, ...] | None  # (K,); None: not known
    weights: tuple[float, ...] | None  # (K,) of one trained token of the turn; None: not known
    handling: Literal["train", "mask", "penalise", "drop"] | None  # Credit.handling; None: not known
    turns: int
    context: int  # the largest, in tokens
    output: int  # tokens of all turns
    condensations: int  # turns whose prompt was condensed
    tool_errors: int  # tool calls that did not succeed
    lost_fact: bool  # not correct; its ground truth was told in an earlier prompt, and is not in the last
    stop: str
    answer: str | None
    seconds: float
    place: LinePlace

    @property
    def advantage(self) -> float | None:
        """The mean over turns; None: not known, or there is no turn."""
        return math.fsum(self.advantages) / len(self.advantages) if self.advantages else None

    @property
    def truncated(self) -> bool:
        """Whether it stopped because a token budget was used up."""
        return self.stop in TRUNCATED

    @property
    def fields(self) -> Fields:
        """The values of ``filters.FIELDS``, for ``--where`` and ``--sort``."""
        return dict(zip(FIELDS, attrgetter(*FIELDS)(self), strict=True))

    @property
    def credit(self) -> Credit | None:
        """What its turns were trained with; None: not known."""
        if self.advantages is None or self.weights is None or self.handling is None:
            return None
        return Credit(trajectory=self.id, advantages=self.advantages, weights=self.weights, handling=self.handling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one problem in one step."""

    id: str
    problem: str
    question: str | None  # None: not known
    ground_truth: str | None  # None: there is no answer in text, or it is not known
    signal: bool | None  # False: it does not train, no member has an advantage; None: no credit was given (yet)
    siblings: tuple[TrajectoryRecord, ...]  # by sample

    @property
    def idle(self) -> str:
        """Why it does not train; empty: it may train."""
        handled = {sibling.handling for sibling in self.siblings}
        if "drop" in handled:
            return "dropped"
        if handled == {"mask"}:
            return "masked"
        return "no signal" if self.signal is False else ""

    @property
    def success(self) -> float:
        """The mean of ``correct``."""
        return math.fsum(sibling.correct for sibling in self.siblings) / len(self.siblings)


def groups(every: Sequence[TrajectoryRecord]) -> tuple[Group, ...]:
    """The trajectories by group, in order of appearance."""
    by_group: dict[str, list[TrajectoryRecord]] = {}
    for record in every:
        by_group.setdefault(record.group, []).append(record)
    return tuple(
        Group(
            id=name,
            problem=members[0].problem,
            question=members[0].question,
            ground_truth=members[0].ground_truth,
            signal=_has_signal(members),
            siblings=tuple(members),
        )
        for name, members in by_group.items()
    )


def _has_signal(members: Sequence[TrajectoryRecord]) -> bool | None:
    """Whether an advantage is not 0. Scores do not tell: an estimator may compare contexts where scores are equal."""
    known = [member.advantages for member in members if member.advantages is not None]
    return any(advantage != 0 for advantages in known for advantage in advantages) if known else None


def natural(text: str) -> str:
    """A sort key that compares numbers in names by value: p2 before p10."""
    return re.sub(r"[0-9]+", lambda digits: digits[0].zfill(12), text.encode("utf-8", "replace").decode())


def holds(fact: str, text: str) -> bool:
    """Whether a fact stands in a text by itself, in letters of either case: 7 in "it is 7.", not in 17, +7 or 7.5."""
    edges = (r"(?<![\w+−-])(?<!\d[.,])", r"(?!\w|[.,]\d)")
    return re.search(re.escape(fact).join(edges), text, re.IGNORECASE) is not None
