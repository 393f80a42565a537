"""The trajectories of a run as one page: what ``condensegrpo inspect RUN --html FILE`` writes.

It has the panes of the terminal's inspector. A trajectory is embedded as it is stored, without its prompt ids. What the
terminal shows beside that stands beside it, computed by the same functions: the script draws it. Only a text that is
typed into the page is searched for there, in ``search.js``; conditions choose what the page holds (``--where``).
"""

import shlex
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from condensegrpo.inspection.history import first_difference, word_changes
from condensegrpo.inspection.index import Index, OpenedTrajectory, TrajectoryBatch
from condensegrpo.inspection.page import page, typed_path
from condensegrpo.inspection.pictures import media_of, pictures_named
from condensegrpo.inspection.records import Group, IndexedTrajectory, groups, verdict
from condensegrpo.inspection.views import READY_VIEWS, select
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.trajectories import row_of

ROW = (  # columns that the page holds
    *("id", "stop", "question", "ground_truth", "answer", "outcome", "detail", "failure"),
    *("rejected_texts", "messages", "turns"),
)
Values = dict[str, object]  # of JSON


def write_inspector(
    file: Path, index: Index, chosen: Sequence[tuple[TrajectoryBatch, Sequence[IndexedTrajectory]]], extent: str
) -> int:
    """Write the page of some trajectories; returns its size in bytes.

    Args:
        extent: says on the page how many trajectories of how many it holds, and of which steps.
    """
    made = _Page(index.path)
    name = index.path.resolve().name
    data = {
        "name": name,
        "extent": extent,
        "ready_views": [(view.name, view.title) for view in READY_VIEWS],
        "batches": [made.batch(batch, records) for batch, records in chosen],
        "tokens": made.tokens,
        "pictures": made.pictures,
    }
    scripts = tuple(f"inspection/{part}.js" for part in ("page", "search", "inspector"))
    styles = ("inspection/page.css", "inspection/inspector.css")
    text = page(name, data, styles=styles, scripts=scripts)
    write_atomically(file, text)
    return len(text)


class _Page:
    """Reads trajectories, and collects what several of them show."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tokens: dict[int, str | None] = {}  # texts of sampled tokens
        self.pictures: dict[str, str] = {}  # data URIs of small pictures, by what stands for them in a text

    def batch(self, batch: TrajectoryBatch, records: Sequence[IndexedTrajectory]) -> Values:
        """A training step or an evaluation with some of its trajectories."""
        matching = ((view.name, select(records, where=view.where, most=len(records)).records) for view in READY_VIEWS)
        views = {name: {record.id for record in matches} for name, matches in matching}
        return {
            "title": batch.title,
            "command": shlex.join(batch.command(typed_path(self._path))),  # that shows it
            "step": batch.number,
            "evaluation": batch.evaluation,  # null: a training batch
            "groups": [
                self._group([batch.open(record) for record in group.siblings], views) for group in groups(records)
            ],
        }

    def _group(self, siblings: Sequence[OpenedTrajectory], views: Mapping[str, Set[str]]) -> Values:
        whole = siblings[0].batch.group(siblings[0].record)
        return {
            "id": whole.id,
            "problem": whole.problem,
            "question": whole.question,
            "ground_truth": whole.ground_truth,
            "exclusion": whole.exclusion,  # why it does not train; empty: it may train
            "success": whole.success,  # of the whole group
            "left_out": len(whole.siblings) - len(siblings),  # that the page does not hold
            "siblings": [self._trajectory(opened, whole, siblings, views) for opened in siblings],
        }

    def _trajectory(
        self,
        opened: OpenedTrajectory,
        group: Group,
        siblings: Sequence[OpenedTrajectory],
        views: Mapping[str, Set[str]],
    ) -> Values:
        trajectory, record = opened.scored.trajectory, opened.record
        stored = {name: value for name, value in row_of(opened.scored).items() if name in ROW}
        for each in (*stored["turns"], *stored["rejected_texts"]):
            del each["prompt_ids"]
        texts = {(message["role"], message["content"]): index for index, message in enumerate(stored["messages"])}
        self.pictures |= pictures_named((content for _, content in texts), media_of(record.file))
        ids = {token for turn in trajectory.turns for token in turn.output_ids}
        self.tokens.update({token: opened.batch.texts.text(token) for token in ids - self.tokens.keys()})
        rewritings: dict[tuple[str, str], int] = {}  # texts before and after
        return {
            "figures": {**record.fields, "handling": record.handling, "verdict": verdict(record.figures)},
            "views": [name for name, matches in views.items() if record.id in matches],  # that it belongs to
            "stored": stored,
            # from each of its siblings, in their order; null: equal
            "first_differences": [first_difference(trajectory, other.scored.trajectory) for other in siblings],
            "turns": [_turn(opened, number, group, texts, rewritings) for number in range(len(opened.turns))],
            "differences": [word_changes(*pair) for pair in rewritings],
        }


def _turn(
    opened: OpenedTrajectory,
    number: int,
    group: Group,
    texts: Mapping[tuple[str, str], int],
    rewritings: dict[tuple[str, str], int],
) -> Values:
    """The values that the page shows of a turn beside the stored ones; adds rewritten texts to ``rewritings``."""
    turn, pieces = opened.turns[number], []  # the history: status, turn, index of the message, and of its rewriting
    for piece in opened.pieces(number):
        rewriting = None
        if piece.rewritten is not None:
            rewriting = rewritings.setdefault((piece.text, piece.rewritten), len(rewritings))
        pieces.append((piece.status, piece.turn, texts[piece.role, piece.text], rewriting))
    return {
        "strip": turn.context.strip,
        "context": turn.context,
        "version": turn.policy_version,
        "advantage": turn.advantage,
        "credit": opened.credit(number, group),
        "pieces": pieces,
    }
