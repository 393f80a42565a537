"""Which trajectories of a run one wants to see: ready views, conditions, and a search over all steps."""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from statistics import fmean
from typing import NamedTuple, TypeVar

from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import did_you_mean
from condensegrpo.inspection.filters import FIELDS, Fields, fields_in, parse_where, sort_key
from condensegrpo.inspection.index import Index, TrajectoryBatch, Visit
from condensegrpo.inspection.records import IndexedTrajectory
from condensegrpo.storage.trajectories import StoredTrajectory, find_text

T = TypeVar("T")
SEARCHED = ("id", "problem", "question", "ground_truth", "answer")  # fields of a fuzzy search
MOST = 1000  # matches that are kept; all are counted
GAP = 2  # characters that a fuzzy match skips between two of the query, at most
AROUND = 40  # characters of an excerpt before and after a hit


class ReadyView(NamedTuple):
    """A frequent question, as a condition and an order."""

    name: str
    title: str
    where: str
    sort: str
    meaning: str


READY_VIEWS = (
    ReadyView(
        "pushed-down",
        "correct but pushed down",
        "correct >= 1 and advantage < 0",
        "advantage",
        "made less likely by its step; Credit says why",
    ),
    ReadyView("truncated", "truncated", "truncated", "-output", "a token budget was used up"),
    ReadyView("tool-errors", "tool errors", "tool_errors > 0", "-tool_errors", "calls that failed, most first"),
    ReadyView("largest-context", "largest context", "context > 0", "-context", "all, the largest prompt first"),
    ReadyView(
        "lost-fact",
        "lost the fact",
        "lost_fact",
        "-turns",
        "wrong, and the ground truth was in an earlier prompt and is not in the last",
    ),
)
GOT_WORSE = "got-worse"  # the view that lists problems


class Matches(NamedTuple):
    """The trajectories for which a condition holds."""

    records: tuple[IndexedTrajectory, ...]  # in order
    total: int  # of all


class SuccessChange(NamedTuple):
    """How the success on a problem changed from the first half of its visits to the last."""

    problem: str
    evaluation: str | None  # the visits are evaluations of this name; None: training
    visits: tuple[Visit, ...]  # two at least
    before: float  # the mean success of the first half; of an odd number, the visit in the middle is in neither
    after: float


class Hit(NamedTuple):
    """A trajectory that a search found."""

    record: IndexedTrajectory
    turn: int | None  # the first that shows the text; None: found in the figures
    excerpt: str


def ready_view(name: str) -> ReadyView:
    """The ready view of a name."""
    names = [*(view.name for view in READY_VIEWS), GOT_WORSE]
    if name not in names:
        hint = did_you_mean(name, names).strip() or f"Views: {', '.join(names)}."
        raise ConfigError(f"reading --view {name!r}: unknown view. {hint}")
    return READY_VIEWS[names.index(name)]


def select(
    records: Iterable[IndexedTrajectory], *, where: str | None = None, sort: str | None = None, most: int = MOST
) -> Matches:
    """The trajectories for which a condition holds, at most ``most``, sorted by a field if one is given."""
    pairs = [(record, record.fields) for record in records]
    known = dict.fromkeys(chain(FIELDS, *(fields for _, fields in pairs)))
    kept, count = _matching(pairs, known, where, sort, most)
    return Matches(tuple(kept), count)


def find(index: Index, batch: TrajectoryBatch | None, *, where: str | None, sort: str | None) -> Matches:
    """As ``select`` among the trajectories of a batch, or of all; only the fields that it asks for are read."""
    known = index.field_names()
    names = fields_in(where, sort, known)
    batches = index.batches() if batch is None else (batch,)
    pairs = (((each, number), fields) for each in batches for number, fields in each.fields(names))
    kept, count = _matching(pairs, known, where, sort, MOST)
    return Matches(tuple(each.at(number) for each, number in kept), count)


def _matching(
    pairs: Iterable[tuple[T, Fields]], known: Collection[str], where: str | None, sort: str | None, most: int
) -> tuple[list[T], int]:
    """The things whose fields match, at most ``most``, and how many there are."""
    condition = parse_where(where, known) if where else lambda _: True
    count = 0

    def matching() -> Iterator[tuple[T, Fields]]:
        nonlocal count
        for thing, fields in pairs:
            if condition(fields):
                count += 1
                yield thing, fields

    if sort:
        by = sort_key(sort, known)
        kept = heapq.nsmallest(most, matching(), key=lambda pair: by(pair[1]))
    else:
        kept = [pair for number, pair in enumerate(matching()) if number < most]
    return [thing for thing, _ in kept], count


def got_worse(index: Index) -> tuple[SuccessChange, ...]:
    """The problems that fewer trajectories solved later on, the largest fall first: in training and in evaluations."""
    every: dict[tuple[str | None, str], list[Visit]] = {}
    for batch in index.batches():
        for problem, visit in batch.visits().items():
            every.setdefault((batch.evaluation, problem), []).append(visit)
    changes = []
    for (kind, problem), visits in every.items():
        if half := len(visits) // 2:
            before, after = (fmean(visit.success for visit in part) for part in (visits[:half], visits[-half:]))
            changes.append(SuccessChange(problem, kind, tuple(visits), before, after))
    fallen = (change for change in changes if change.after < change.before)
    return tuple(sorted(fallen, key=lambda change: change.after - change.before))


def search(index: Index, query: str, *, on_read: Callable[[float], None] = lambda _: None) -> Iterator[Hit]:
    """The trajectories of all steps that a query finds, as they are found; stop whenever enough are there.

    First those whose id, problem, question, ground truth or answer has the letters of the query in order, with at most
    two others between any two (``qck`` finds ``quick``); then those of which a message has the query as it stands, in
    letters of either case.

    Args:
        on_read: called with the share of the trajectories whose messages were read.
    """
    shown = set[StoredTrajectory]()
    if query.strip():
        for hit in chain(fuzzy(index, query), full_text(index, query, on_read=on_read)):
            if hit.record.stored not in shown:
                shown.add(hit.record.stored)
                yield hit


def fuzzy(index: Index, query: str) -> tuple[Hit, ...]:
    """The trajectories whose figures match a query, those with the fewest letters in between first."""
    letters = query.strip().lower()
    hits: list[tuple[int, int, TrajectoryBatch, int, str]] = []
    every = ((batch, *each) for batch in index.batches() for each in batch.fields(SEARCHED))
    for order, (batch, number, fields) in enumerate(every):
        texts = [text for text in fields.values() if isinstance(text, str)]
        matches = [(end - first, text, first, end) for text in texts for first, end in _in_order(text.lower(), letters)]
        if matches:
            length, text, first, end = min(matches)
            hits.append((length, order, batch, number, _excerpt(text, first, end)))
    return tuple(Hit(batch.at(number), None, text) for *_, batch, number, text in heapq.nsmallest(MOST, hits))


def _in_order(text: str, letters: str) -> Iterator[tuple[int, int]]:
    """Where parts begin and end that have the letters in their order, at most ``GAP`` others between two."""
    left = iter(text)
    if not letters or not all(letter in left for letter in letters):  # nearly all texts end here
        return
    # by its end, the latest position at which a part begins
    ends = {position + 1: position for position, letter in enumerate(text) if letter == letters[0]}
    for letter in letters[1:]:
        longer: dict[int, int] = {}
        for end, begin in ends.items():
            for position in range(end, min(end + GAP + 1, len(text))):
                if text[position] == letter:
                    longer[position + 1] = max(begin, longer.get(position + 1, 0))
        ends = longer
    yield from ((begin, end) for end, begin in ends.items())


def full_text(index: Index, query: str, *, on_read: Callable[[float], None] = lambda _: None) -> Iterator[Hit]:
    """The trajectories of which a message has a text, in letters of either case, as they are found."""
    text, batches, read = query.strip().lower(), index.batches(), 0
    total = sum(batch.trajectories for batch in batches)
    for batch in batches:
        for part in batch.parts:
            for size, rows in find_text(part, text):
                hits = (_hit(record, text) for record in batch.stored(part, rows))
                yield from (hit for hit in hits if hit is not None)
                read += size
                on_read(read / total)


def _hit(record: IndexedTrajectory, text: str) -> Hit | None:
    for number, turn in enumerate(record.read().trajectory.turns):
        for message in (*(turn.context if number == 0 else ()), turn.reply, *turn.observations):
            position = message.text.lower().find(text)
            if position >= 0:
                return Hit(record, number, _excerpt(message.text, position, position + len(text)))
    return None  # a rewritten context shows it alone


def _excerpt(text: str, start: int, end: int) -> str:
    first, last = max(0, start - AROUND), end + AROUND
    return f"{'…' if first else ''}{text[first:last]}{'…' if last < len(text) else ''}"
