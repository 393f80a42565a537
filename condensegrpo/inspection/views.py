"""Which trajectories of a run one wants to see: ready views, conditions, and a search over all steps."""

import heapq
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.core.suggestions import did_you_mean
from condensegrpo.core.trajectory import ScoredTrajectory
from condensegrpo.inspection.filters import parse_where, sort_key
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.records import LinePlace, TrajectoryRecord

MOST = 1000  # matches that are kept; all are counted
GAP = 2  # characters that a fuzzy match skips between two of the query, at most
AROUND = 40  # characters of an excerpt before and after a hit


class ReadyView(NamedTuple):
    """A question that is asked often, as a condition and an order."""

    name: str
    title: str
    where: str
    sort: str


READY_VIEWS = (
    ReadyView("pushed-down", "correct but pushed down", "correct >= 1 and advantage < 0", "advantage"),
    ReadyView("truncated", "truncated", "truncated", "-output"),
    ReadyView("tool-errors", "tool errors", "tool_errors > 0", "-tool_errors"),
    ReadyView("largest-context", "largest context", "context > 0", "-context"),
    ReadyView("lost-fact", "lost the fact", "lost_fact", "-turns"),
)


class Matches(NamedTuple):
    """The trajectories for which a condition holds."""

    records: tuple[TrajectoryRecord, ...]  # in order
    total: int  # of all


class Hit(NamedTuple):
    """A trajectory that a search found."""

    record: TrajectoryRecord
    turn: int | None  # the first that shows the text; None: found in the figures
    excerpt: str


def ready_view(name: str) -> ReadyView:
    """The ready view of a name.

    Raises:
        ConfigError: there is none.
    """
    names = [view.name for view in READY_VIEWS]
    if name not in names:
        hint = did_you_mean(name, names).strip() or f"Views: {', '.join(names)}."
        raise ConfigError(f"reading --view {name!r}: unknown view. {hint}")
    return READY_VIEWS[names.index(name)]


def select(
    records: Iterable[TrajectoryRecord], *, where: str | None = None, sort: str | None = None, most: int = MOST
) -> Matches:
    """The trajectories for which a condition holds, at most ``most``, sorted by a field if one is given.

    Raises:
        ConfigError: the condition or the field cannot be read.
    """
    condition = parse_where(where) if where else lambda _: True
    count = 0

    def matching() -> Iterator[TrajectoryRecord]:
        nonlocal count
        for record in records:
            if condition(record.fields):
                count += 1
                yield record

    if sort:
        by = sort_key(sort)
        kept = heapq.nsmallest(most, matching(), key=lambda record: by(record.fields))
    else:
        kept = [record for number, record in enumerate(matching()) if number < most]
    return Matches(tuple(kept), count)


def search(index: Index, query: str) -> Iterator[Hit]:
    """The trajectories of all steps that a query finds, as they are found; stop whenever enough are there.

    First those whose id, problem, question, ground truth or answer has the letters of the query in order, with at most
    two others between any two (``qck`` finds ``quick``); then those of which a message has the query as it stands, in
    letters of either case.
    """
    shown = set[LinePlace]()
    if query.strip():
        for hit in chain(fuzzy(index.records(), query), full_text(index, query)):
            if hit.record.place not in shown:
                shown.add(hit.record.place)
                yield hit


def fuzzy(records: Iterable[TrajectoryRecord], query: str) -> tuple[Hit, ...]:
    """The trajectories whose figures match a query, those with the fewest letters in between first."""
    pattern = re.compile(f".{{0,{GAP}}}?".join(map(re.escape, query.strip())), re.IGNORECASE | re.DOTALL)
    hits: list[tuple[int, int, Hit]] = []
    for number, record in enumerate(records):
        texts = (record.id, record.problem, record.question, record.ground_truth, record.answer)
        matches = [match for text in texts if text and (match := pattern.search(text))]
        if matches:
            best = min(matches, key=lambda match: len(match[0]))
            hits.append((len(best[0]), number, Hit(record, None, _excerpt(best.string, best.start(), best.end()))))
    return tuple(hit for *_, hit in heapq.nsmallest(MOST, hits))


def full_text(index: Index, query: str) -> Iterator[Hit]:
    """The trajectories of which a message has a text, in letters of either case, as they are found."""
    wanted = query.strip().lower()
    stored = json.dumps(wanted)[1:-1].encode().lower()  # as a line of ASCII JSON has it
    for batch in index.batches():
        for start, line in _lines(batch.file):
            record = index.at(batch, start) if stored in line.lower() else None
            if record is not None and (hit := _hit(index.read(record), record, wanted)) is not None:
                yield hit


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, each with the byte at which it starts."""
    try:
        with path.open("rb") as file:
            start = 0
            for line in file:
                yield start, line
                start += len(line)
    except OSError as error:
        raise DataError(f"reading {path}: {error.strerror}.") from error


def _hit(scored: ScoredTrajectory, record: TrajectoryRecord, wanted: str) -> Hit | None:
    for number, turn in enumerate(scored.trajectory.turns):
        for message in (*(turn.context if number == 0 else ()), turn.reply, *turn.observations):
            place = message.content.lower().find(wanted)
            if place >= 0:
                return Hit(record, number, _excerpt(message.content, place, place + len(wanted)))
    return None  # it is a name in the JSON


def _excerpt(text: str, start: int, end: int) -> str:
    first, last = max(0, start - AROUND), end + AROUND
    return f"{'…' if first else ''}{text[first:last]}{'…' if last < len(text) else ''}"
