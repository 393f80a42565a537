"""The trajectories of a run as one page: what ``condensegrpo inspect RUN --html FILE`` writes.

It has the panes of the terminal's inspector. A trajectory is embedded as it is stored, without its prompt ids. What the
terminal shows beside that stands beside it, computed by the same functions: the script draws it. Only a text that is
typed into the page is searched for there, in ``search.js``; conditions choose what the page holds (``--where``).
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.inspection.batches import TrajectoryBatch, command_of
from condensegrpo.inspection.history import WordChange, word_changes
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.opened import (
    CreditLine,
    FirstDifference,
    OpenedTrajectory,
    TrajectoryReader,
    first_difference,
)
from condensegrpo.inspection.page import page, typed_path
from condensegrpo.inspection.panes import ContextView
from condensegrpo.inspection.pictures import media_of, pictures_named
from condensegrpo.inspection.records import Group, IndexedTrajectory, groups, verdict
from condensegrpo.inspection.views import READY_VIEWS, select
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.trajectories import Row, row_of

ROW = (  # columns that the page holds
    *("id", "stop", "question", "ground_truth", "answer", "outcome", "detail", "failure"),
    *("rejected_texts", "messages", "turns"),
)
PagePiece = tuple[str, int | None, int, int | None]  # status, turn, index of the message, index of its difference


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTurn:
    """What is shown of a turn beside what is stored of it."""

    strip: str  # what the prompt shows of each earlier turn: k kept, d dropped, r rewritten, - none
    context: ContextView
    version: int | None  # of the policy; None: not known
    advantage: float | None
    credit: tuple[CreditLine, ...]
    pieces: tuple[PagePiece, ...]  # the history with what was dropped and rewritten


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTrajectory:
    """One trajectory."""

    figures: Mapping[str, object]  # of conditions; handling and verdict
    views: tuple[str, ...]  # the ready views that it belongs to
    first_differences: tuple[FirstDifference | None, ...]  # from each of its siblings, in their order; None: equal
    stored: Mapping[str, object]  # columns of its file, without prompt ids
    turns: tuple[PageTurn, ...]
    differences: tuple[tuple[tuple[WordChange, str], ...], ...]  # of rewritten messages


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGroup:
    """The trajectories of one problem."""

    id: str
    problem: str
    question: str | None
    ground_truth: str | None
    exclusion: str  # why it does not train; empty: it may train
    success: float  # of the whole group
    left_out: int  # siblings that the page does not hold
    siblings: tuple[PageTrajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBatch:
    """A training step or an evaluation."""

    title: str
    command: str  # that shows it
    step: int | None
    evaluation: str | None  # None: a training batch
    groups: tuple[PageGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorPage:
    """The data of the page."""

    name: str
    extent: str  # how many trajectories of how many it holds, and of which steps
    tokens: Mapping[int, str | None]  # texts of sampled tokens
    pictures: Mapping[str, str]  # data URIs of small pictures, by what stands for them in a text
    ready_views: tuple[tuple[str, str], ...]  # name and title
    batches: tuple[PageBatch, ...]


def write_inspector(
    file: Path, index: Index, chosen: Sequence[tuple[TrajectoryBatch, Sequence[IndexedTrajectory]]], extent: str
) -> int:
    """Write the page of some trajectories; returns its size in bytes.

    Args:
        extent: says on the page how many trajectories of how many it holds, and of which steps.
    """
    tokens: dict[int, str | None] = {}
    pictures: dict[str, str] = {}
    data = InspectorPage(
        name=index.path.resolve().name,
        extent=extent,
        tokens=tokens,
        pictures=pictures,
        ready_views=tuple((view.name, view.title) for view in READY_VIEWS),
        batches=tuple(
            _Reader(index, batch, records, tokens=tokens, pictures=pictures).page_batch() for batch, records in chosen
        ),
    )
    scripts = tuple(f"inspection/{name}.js" for name in ("page", "search", "inspector"))
    styles = ("inspection/page.css", "inspection/inspector.css")
    text = page(data.name, data, styles=styles, scripts=scripts)
    write_atomically(file, text)
    return len(text)


class _Reader:
    """Reads the trajectories of one batch for the page."""

    def __init__(
        self,
        index: Index,
        batch: TrajectoryBatch,
        records: Sequence[IndexedTrajectory],
        *,
        tokens: dict[int, str | None],
        pictures: dict[str, str],
    ) -> None:
        """``tokens`` and ``pictures`` are those of the page, to which those of the trajectories are added."""
        self._index, self._records, self._tokens, self._pictures = index, records, tokens, pictures
        self._reader = TrajectoryReader(index, batch)
        self._largest = max(record.figures.context_tokens for record in records)
        matching = ((view.name, select(records, where=view.where, most=len(records)).records) for view in READY_VIEWS)
        self._views = {name: {record.id for record in matches} for name, matches in matching}

    def page_batch(self) -> PageBatch:
        """The batch with these of its trajectories."""
        batch = self._reader.batch
        return PageBatch(
            title=batch.title,
            command=shlex.join(command_of(typed_path(self._index.path), batch)),
            step=batch.number,
            evaluation=batch.evaluation,
            groups=tuple(self._group(group.siblings) for group in groups(self._records)),
        )

    def _group(self, shown: Sequence[IndexedTrajectory]) -> PageGroup:
        whole = self._index.group(shown[0])
        siblings = [self._reader.open(record, largest=self._largest) for record in shown]
        return PageGroup(
            id=whole.id,
            problem=whole.problem,
            question=whole.question,
            ground_truth=whole.ground_truth,
            exclusion=whole.exclusion,
            success=whole.success,
            left_out=len(whole.siblings) - len(shown),
            siblings=tuple(self._trajectory(opened, whole, siblings) for opened in siblings),
        )

    def _trajectory(
        self, opened: OpenedTrajectory, group: Group, siblings: Sequence[OpenedTrajectory]
    ) -> PageTrajectory:
        trajectory, record = opened.scored.trajectory, opened.record
        kept = _page_row(opened.scored)
        messages = kept["messages"]
        self._pictures |= pictures_named((message["content"] for message in messages), media_of(record.file))
        ids = {token for turn in trajectory.turns for token in turn.output_ids}
        self._tokens.update({token: self._reader.texts.text(token) for token in ids - self._tokens.keys()})
        indices: dict[tuple[str, str], int] = {
            (message["role"], message["content"]): index for index, message in enumerate(messages)
        }
        rewritings: dict[tuple[str, str], int] = {}
        return PageTrajectory(
            figures={**record.fields, "handling": record.handling, "verdict": verdict(record.figures)},
            views=tuple(name for name, matches in self._views.items() if record.id in matches),
            stored=kept,
            first_differences=tuple(first_difference(trajectory, other.scored.trajectory) for other in siblings),
            turns=tuple(_turns(opened, group, indices, rewritings)),
            differences=tuple(word_changes(*pair) for pair in rewritings),
        )


def _page_row(scored: ScoredTrajectory) -> Row:
    """What the page shows of the row of a trajectory."""
    row = {name: value for name, value in row_of(scored).items() if name in ROW}
    for each in (*row["turns"], *row["rejected_texts"]):
        del each["prompt_ids"]
    return row


def _turns(
    opened: OpenedTrajectory,
    group: Group,
    indices: Mapping[tuple[str, str], int],
    rewritings: dict[tuple[str, str], int],
) -> Iterator[PageTurn]:
    """The turns of a trajectory; adds what was rewritten, with its text before, to ``rewritings``."""
    for number, turn in enumerate(opened.turns):
        pieces = list[PagePiece]()
        for piece in opened.pieces(number):
            rewriting = None
            if piece.rewritten is not None:
                rewriting = rewritings.setdefault((piece.text, piece.rewritten), len(rewritings))
            pieces.append((piece.status, piece.turn, indices[piece.role, piece.text], rewriting))
        yield PageTurn(
            strip=turn.context.strip,
            context=turn.context,
            version=turn.policy_version,
            advantage=turn.advantage,
            credit=opened.credit(number, group),
            pieces=tuple(pieces),
        )
