"""A trajectory opened from its file, with all that is shown of it: the values that every view draws.

    reader = TrajectoryReader(index, batch)
    opened = reader.open(record, largest=4096)
    opened.turns[2], opened.pieces(2), opened.credit(2, group), opened.prompt(2)

The views are the application on a terminal, the printed text, notebooks, and the HTML page.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.inspection.batches import TrajectoryBatch
from condensegrpo.inspection.formula import CreditFormulas, CreditLine
from condensegrpo.inspection.history import HistoryPiece, history
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.panes import TokenTexts, TokenView, TurnView, turns
from condensegrpo.inspection.records import Group, IndexedTrajectory


class TrajectoryReader:
    """Opens the trajectories of one batch; its tokenizer and configuration are read once, when they are needed."""

    def __init__(self, index: Index, batch: TrajectoryBatch) -> None:
        self._index, self.batch = index, batch
        self.formulas = CreditFormulas(batch)

    @cached_property
    def texts(self) -> TokenTexts:
        """The texts of tokens."""
        return TokenTexts(self.batch)

    @cached_property
    def budget(self) -> int | None:
        """The context budget in tokens; None: it is not known."""
        return self.batch.provenance.max_context_tokens if self.batch.provenance is not None else None

    def open(self, record: IndexedTrajectory, *, largest: int, tokens: bool = False) -> "OpenedTrajectory":
        """Read a trajectory.

        Args:
            record: which one.
            largest: tokens of the context that stands for the budget if that is not known.
            tokens: whether its turns have their sampled tokens.

        Raises:
            TrajectoryFileError: its line is damaged.
            DataError: the file cannot be read.
        """
        scored = self._index.read(record)
        views = turns(
            scored,
            record.credit,
            budget=largest if self.budget is None else self.budget,
            tokenizer=self.texts if tokens else None,
            version_known=self.batch.version_known,
        )
        return OpenedTrajectory(record=record, scored=scored, turns=views, reader=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTrajectory:
    """A trajectory that was read from its file."""

    record: IndexedTrajectory
    scored: ScoredTrajectory
    turns: tuple[TurnView, ...]
    reader: TrajectoryReader

    @property
    def batch(self) -> TrajectoryBatch:
        """The step or evaluation that it belongs to."""
        return self.reader.batch

    def pieces(self, turn: int) -> tuple[HistoryPiece, ...]:
        """The whole history before a turn, with what was dropped and rewritten in its place."""
        return history(self.scored.trajectory, turn, self.turns[turn].context.statuses)

    def credit(self, turn: int, group: Group) -> tuple[CreditLine, ...]:
        """The steps from the reward to the weight of a turn's tokens, in the trajectory's group.

        Raises:
            CondenseError: the credit file is damaged.
        """
        return self.reader.formulas.lines(self.record, group, self.turns[turn])

    def prompt(self, turn: int) -> str | None:
        """The prompt of a turn as text, special tokens included; None: there is no tokenizer."""
        return self.reader.texts.prompt(self.scored.trajectory.turns[turn])

    def tokens(self, turn: int) -> tuple[TokenView, ...]:
        """The sampled tokens of a turn."""
        return self.reader.texts.views(self.scored.trajectory.turns[turn])


class FirstDifference(NamedTuple):
    """The first difference of two trajectories."""

    turn: int
    where: str  # prompt, or reply


def first_difference(first: Trajectory, second: Trajectory) -> FirstDifference | None:
    """The first turn whose prompt or reply differ, by tokens and by texts; None: they are equal."""
    for number, (one, other) in enumerate(zip(first.turns, second.turns, strict=False)):
        if one.prompt_ids != other.prompt_ids or one.context != other.context:
            return FirstDifference(number, "prompt")
        if one.output_ids != other.output_ids or one.reply != other.reply:
            return FirstDifference(number, "reply")
    if len(first.turns) == len(second.turns):
        return None
    return FirstDifference(min(len(first.turns), len(second.turns)), "reply")
