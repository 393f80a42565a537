"""The trajectories of a run as one page: what ``condensegrpo inspect RUN --html FILE`` writes.

It has the panes of the terminal's inspector. A trajectory is embedded as it is stored, every message once; what the
page cannot compute from that (the history with what was dropped, the credit) stands beside it, by its messages.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import ScoredTrajectory
from condensegrpo.inspection.batches import TrajectoryBatch, budget_of
from condensegrpo.inspection.context_view import ContextView
from condensegrpo.inspection.formula import CreditFormulas, CreditLine
from condensegrpo.inspection.history import WordChange, difference, history
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.page import page, shell_path
from condensegrpo.inspection.panes import TokenTexts, turns
from condensegrpo.inspection.records import TrajectoryRecord, groups
from condensegrpo.inspection.views import READY_VIEWS, select
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.stored_trajectory import stored

Piece = tuple[str, int | None, int, int | None]  # status, turn, place of the message, place of its difference


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTurn:
    """What the page cannot compute of a turn."""

    strip: str  # what the prompt shows of each earlier turn: k kept, d dropped, r rewritten, - none
    context: ContextView
    version: int | None  # of the policy; None: not known
    advantage: float | None
    weight: float | None  # of one token's loss; 0.0: not trained
    credit: tuple[CreditLine, ...]
    pieces: tuple[Piece, ...]  # the history with what was dropped and rewritten


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTrajectory:
    """One trajectory."""

    figures: TrajectoryRecord
    views: tuple[str, ...]  # the ready views that it belongs to
    stored: Mapping[str, object]  # as a line of its file has it
    turns: tuple[PageTurn, ...]
    differences: tuple[tuple[tuple[WordChange, str], ...], ...]  # of rewritten messages


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGroup:
    """The trajectories of one problem."""

    id: str
    problem: str
    question: str | None
    ground_truth: str | None
    idle: str  # why it does not train; empty: it may train
    siblings: tuple[PageTrajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBatch:
    """A training step or an evaluation."""

    step: int | None
    evaluation: str | None  # None: a training batch
    groups: tuple[PageGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorPage:
    """The data of the page."""

    name: str
    folder: str  # as a shell takes it
    tokens: Mapping[int, str | None]  # texts of sampled tokens
    ready_views: tuple[tuple[str, str], ...]  # name and title
    batches: tuple[PageBatch, ...]


def write_inspector(
    file: Path, index: Index, chosen: Sequence[tuple[TrajectoryBatch, Sequence[TrajectoryRecord]]]
) -> int:
    """Write the page of some trajectories; returns its size in bytes.

    Raises:
        TrajectoryFileError: a line is damaged.
        RunError: the file cannot be written.
    """
    tokens: dict[int, str | None] = {}
    data = InspectorPage(
        name=index.path.resolve().name,
        folder=shell_path(index.path),
        tokens=tokens,
        ready_views=tuple((view.name, view.title) for view in READY_VIEWS),
        batches=tuple(_Reader(index, batch, records).page_batch(records, tokens) for batch, records in chosen),
    )
    scripts = tuple(f"inspection/{name}.js" for name in ("page", "search", "inspector"))
    styles = ("inspection/page.css", "inspection/inspector.css")
    text = page(data.name, data, styles=styles, scripts=scripts)
    write_atomically(file, text)
    return len(text)


class _Reader:
    """Reads the trajectories of one batch for the page."""

    def __init__(self, index: Index, batch: TrajectoryBatch, records: Sequence[TrajectoryRecord]) -> None:
        self._index, self._batch = index, batch
        self._formulas, self._texts = CreditFormulas(index, batch), TokenTexts(batch)
        self._budget = budget_of(batch) or max(record.context for record in records)
        matching = ((view.name, select(records, where=view.where, most=len(records)).records) for view in READY_VIEWS)
        self._views = {name: {record.id for record in matches} for name, matches in matching}

    def page_batch(self, records: Sequence[TrajectoryRecord], tokens: dict[int, str | None]) -> PageBatch:
        """The batch with some of its trajectories; adds the texts of sampled tokens to ``tokens``."""
        batch = self._batch
        return PageBatch(
            step=batch.number,
            evaluation=(batch.evaluation or batch.file.stem) if batch.is_evaluation else None,
            groups=tuple(
                PageGroup(
                    id=group.id,
                    problem=group.problem,
                    question=group.question,
                    ground_truth=group.ground_truth,
                    idle=group.idle,
                    siblings=tuple(self._trajectory(record, tokens) for record in group.siblings),
                )
                for group in groups(records)
            ),
        )

    def _trajectory(self, record: TrajectoryRecord, tokens: dict[int, str | None]) -> PageTrajectory:
        scored = self._index.read(record)
        ids = {token for turn in scored.trajectory.turns for token in turn.output_ids}
        tokens.update({token: self._texts.text(token) for token in ids - tokens.keys()})
        kept = stored(scored.trajectory)
        messages = cast(list[Message], kept["messages"])
        places: dict[tuple[str, str], int] = {
            (message.role, message.text): place for place, message in enumerate(messages)
        }
        rewritings: dict[tuple[str, str], int] = {}
        return PageTrajectory(
            figures=record,
            views=tuple(name for name, matches in self._views.items() if record.id in matches),
            stored=kept | {"messages": [replace(message, content=message.text) for message in messages]},
            turns=tuple(self._turns(record, scored, places, rewritings)),
            differences=tuple(difference(*pair) for pair in rewritings),
        )

    def _turns(
        self,
        record: TrajectoryRecord,
        scored: ScoredTrajectory,
        places: Mapping[tuple[str, str], int],
        rewritings: dict[tuple[str, str], int],
    ) -> Iterator[PageTurn]:
        """The turns of a trajectory; adds what was rewritten, with its text before, to ``rewritings``."""
        known, group = self._batch.version_known, self._index.group(record)  # with siblings that the page leaves out
        for turn in turns(scored, record.credit, budget=self._budget, tokenizer=None, version_known=known):
            statuses, pieces = turn.context.statuses, list[Piece]()
            for piece in history(scored.trajectory, turn.turn, statuses):
                rewriting = None
                if piece.rewritten is not None:
                    rewriting = rewritings.setdefault((piece.text, piece.rewritten), len(rewritings))
                pieces.append((piece.status, piece.turn, places[piece.role, piece.text], rewriting))
            yield PageTurn(
                strip="".join(statuses[earlier][0] if earlier in statuses else "-" for earlier in range(turn.turn)),
                context=turn.context,
                version=turn.policy_version,
                advantage=turn.advantage,
                weight=turn.weight,
                credit=self._formulas.lines(record, group, turn),
                pieces=tuple(pieces),
            )
