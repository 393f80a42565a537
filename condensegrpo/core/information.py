"""Information of contexts about the answer, turn by turn: curves and losses. Pure functions; standard library only.

Legend: I_t = log π(ground truth | c_t) in nats, see episodes/information.py; None where it was not measured.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean
from typing import NamedTuple

from condensegrpo.core.trajectory import SpanStatus, Trajectory


class InformationChange(NamedTuple):
    """The information about the answer before and after a condensation."""

    turn: int  # whose context was condensed
    before: float  # I of the last context that was measured
    after: float  # I of this one
    dropped: tuple[int, ...]  # turns that the context before showed verbatim and this one does not


def curve(trajectory: Trajectory) -> tuple[float | None, ...]:
    """I_t of every turn."""
    return tuple(turn.answer_logprob for turn in trajectory.turns)


def changes(trajectory: Trajectory) -> tuple[InformationChange, ...]:
    """Every measured condensed context after another measured context."""
    result: list[InformationChange] = []
    before: float | None = None
    shown = set[int]()  # turns that the last context showed verbatim
    units = set[int]()  # turns in which the policy acted before
    for number, turn in enumerate(trajectory.turns):
        if turn.kind != "act":
            continue
        spans = turn.condensation.spans if turn.condensation is not None else ()
        kept = {turn for span in spans if span.status is SpanStatus.KEPT for turn in span.turns}
        if before is not None and turn.answer_logprob is not None and spans:
            result.append(InformationChange(number, before, turn.answer_logprob, tuple(sorted(shown - kept))))
        before = before if turn.answer_logprob is None else turn.answer_logprob
        shown = (units & kept if spans else shown) | {number}
        units |= {number}
    return tuple(result)


def lost(trajectory: Trajectory) -> float | None:
    """Nats lost by condensations, gains excluded: Σ max(before − after, 0). None: nothing was measured."""
    if all(value is None for value in curve(trajectory)):
        return None
    return math.fsum(max(change.before - change.after, 0.0) for change in changes(trajectory))


def mean_curve(curves: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    """The mean of each turn over the trajectories that got there and measured it.

    (−2, −4), (−4, −6, −1)   ─▶   −3, −5, −1
    """
    columns = [[value for value in column if value is not None] for column in zip_longest(*curves)]
    return tuple(fmean(column) if column else None for column in columns)


def description(change: InformationChange) -> str:
    """One sentence, such as: information about the answer fell from −1.2 to −9.7 nats when turn 3 was dropped."""
    before, after = (f"{nats:.1f}" for nats in (change.before, change.after))
    course = f"{'fell' if change.after < change.before else 'rose'} from {before} to {after} nats"
    if before == after:
        course = f"stayed at {after} nats"
    cause = f"turn {change.turn} was condensed"
    if change.dropped:
        numbers = ", ".join(map(str, change.dropped))
        cause = f"turn {numbers} was dropped" if len(change.dropped) == 1 else f"turns {numbers} were dropped"
    return f"information about the answer {course} when {cause}".replace("-", "−")
