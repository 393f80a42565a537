"""One trajectory as lists show it, and the trajectories of one problem in one step."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from condensegrpo.core.scored_trajectory import ScoredTrajectory, TrajectoryStats
from condensegrpo.core.wording import plural
from condensegrpo.inspection.filters import FIELDS, Fields
from condensegrpo.storage.trajectories import Credit, StoredTrajectory, read_trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedTrajectory:
    """A trajectory without its turns: its figures, the texts that lists show, its credit and its row."""

    number: int  # its index in the batch by groups and samples, from 0; --trajectory takes it
    step: int | None  # of its batch; None: not known
    evaluation: str | None  # the name of the evaluation; None: it was sampled to train
    figures: TrajectoryStats
    question: str | None  # None: not known
    ground_truth: str | None  # None: there is no answer in text, or it is not known
    answer: str | None
    credit: Credit | None  # what its turns were trained with; None: not known
    file: Path  # of its batch
    stored: StoredTrajectory

    def read(self) -> ScoredTrajectory:
        """The trajectory itself, from its file."""
        return read_trajectory(self.stored)

    @property
    def id(self) -> str:
        """Its name."""
        return self.figures.id

    @property
    def advantages(self) -> tuple[float, ...] | None:
        """(K,) of its turns; None: not known."""
        return self.credit.advantages if self.credit is not None else None

    @property
    def advantage(self) -> float | None:
        """The mean over turns; None: not known, or there is no turn."""
        return mean(self.advantages)

    @property
    def handling(self) -> str | None:
        """``Credit.handling``; None: not known."""
        return self.credit.handling if self.credit is not None else None

    @property
    def fields(self) -> Fields:
        """The values of ``filters.FIELDS``, for ``--where`` and ``--sort``, and of other parts of the reward."""
        plain = dict(zip(FIELDS, attrgetter(*FIELDS.values())(self), strict=True))
        return plain | {name: value for name, value in self.figures.components.items() if name not in plain}

    @property
    def values(self) -> Mapping[str, object]:
        """What ``--json`` prints of it: the fields of conditions, its reward parts, its credit and its row."""
        return {
            "number": self.number,
            **{name: self.fields[name] for name in FIELDS},
            "components": self.figures.components,
            "advantages": self.advantages,
            "weights": self.credit.weights if self.credit is not None else None,
            "handling": self.handling,
            "stored": self.stored._asdict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one problem in one step."""

    id: str
    problem: str
    question: str | None  # None: not known
    ground_truth: str | None  # None: there is no answer in text, or it is not known
    signal: bool | None  # False: it does not train, no member has an advantage; None: no credit was given (yet)
    siblings: tuple[IndexedTrajectory, ...]  # by sample

    @property
    def exclusion(self) -> str:
        """Why it does not train; empty: it may train."""
        handled = {sibling.handling for sibling in self.siblings}
        if "drop" in handled:
            return "dropped"
        if handled == {"mask"}:
            return "masked"
        return "no signal" if self.signal is False else ""

    @property
    def was_scored(self) -> bool:
        """Whether a reward saw the trajectories; else the success says nothing."""
        return any(sibling.figures.judged for sibling in self.siblings)

    @property
    def success(self) -> float:
        """The mean of ``correct``."""
        return math.fsum(sibling.figures.correct for sibling in self.siblings) / len(self.siblings)

    def credit_sentence(self, record: IndexedTrajectory) -> str:
        """The advantage of a sibling in one sentence; empty if it is not known.

        all 8 right; 31 tokens against the siblings' 24: −0.13
        """
        if record.advantage is None or not self.was_scored:
            return ""
        right, count = sum(sibling.figures.correct >= 1 for sibling in self.siblings), len(self.siblings)
        judged = f"{right} of {count} right, this one {'right' if record.figures.correct >= 1 else 'wrong'}"
        if right in (0, count):
            judged = f"all {count} right" if right else f"none of {count} right"
        others = [each.figures.context_tokens for each in self.siblings if each.number != record.number]
        beside = f" against the siblings' {mean(others):.0f}" if others else ""
        return f"{judged}; {plural(record.figures.context_tokens, 'token')}{beside}: {record.advantage:+.2f}".replace(
            "-", "−"
        )


def groups(every: Sequence[IndexedTrajectory]) -> tuple[Group, ...]:
    """The trajectories by group, in order of appearance."""
    by_group: dict[str, list[IndexedTrajectory]] = {}
    for record in every:
        by_group.setdefault(record.figures.group_id, []).append(record)
    found = []
    for name, members in by_group.items():
        # scores do not tell whether there is a signal: an estimator may compare contexts where scores are equal
        known = [member.advantages for member in members if member.advantages is not None]
        found.append(
            Group(
                id=name,
                problem=members[0].figures.problem_id,
                question=members[0].question,
                ground_truth=members[0].ground_truth,
                signal=any(advantage != 0 for advantages in known for advantage in advantages) if known else None,
                siblings=tuple(members),
            )
        )
    return tuple(found)


def verdict(figures: TrajectoryStats) -> tuple[str, str]:
    """Correct, wrong, partly correct, malformed or not judged, as a mark and a word; and its quality."""
    if not figures.judged:
        return "– not judged", "partial"
    if not figures.format_valid:
        return "✗ malformed", "bad"
    if figures.correct >= 1:
        return "✓ correct", "good"
    return ("✗ wrong", "bad") if figures.correct <= 0 else (f"◐ {figures.correct:.2f}", "partial")


def mean(values: Sequence[float] | None) -> float | None:
    """The mean of some values; None: there are none."""
    return math.fsum(values) / len(values) if values else None


def natural(text: str) -> str:
    """A sort key that compares numbers in names by value: p2 before p10."""
    return re.sub(r"[0-9]+", lambda digits: digits[0].zfill(12), text)
