"""Trajectories as values of Python: shown on a terminal and in notebooks, and as DataFrames."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, overload

from rich.console import RenderableType
from rich.text import Text

from condensegrpo.core.errors import concise_class
from condensegrpo.core.scored_trajectory import ScoredTrajectory, TrajectoryStats
from condensegrpo.core.trajectory import Score, Trajectory
from condensegrpo.display import theme
from condensegrpo.display.tables import sibling_table
from condensegrpo.display.trajectory_view import details, heading, overview
from condensegrpo.inspection.index import TrajectoryBatch
from condensegrpo.inspection.panes import TurnView
from condensegrpo.inspection.pictures import media_of
from condensegrpo.inspection.records import IndexedTrajectory
from condensegrpo.reporting.frames import Library, Row, frame, trajectory_row, turn_rows

HTML = '<pre style="overflow-x:auto;padding:1em;line-height:1.25;color:#d0d0d0;background:#16181d">{code}</pre>'


@concise_class
class Rollout:
    """One scored trajectory. Its turns are read from the file when they are first needed."""

    def __init__(self, batch: TrajectoryBatch, record: IndexedTrajectory) -> None:
        self.batch = batch
        self.record = record  # with the credit that it was trained with

    @property
    def id(self) -> str:
        """Step, problem and sample, such as ``6/12/3``."""
        return self.record.id

    @property
    def figures(self) -> TrajectoryStats:
        """Its figures: correctness, reward, stop, turns, tokens; no file is read."""
        return self.record.figures

    @property
    def trajectory(self) -> Trajectory:
        """Every turn: the prompt, the sampled tokens, what was condensed."""
        return self.scored.trajectory

    @property
    def score(self) -> Score:
        """Reward, its parts, and the judgements of correctness and format."""
        return self.scored.score

    @cached_property
    def scored(self) -> ScoredTrajectory:
        """Trajectory and score.

        Raises:
            DataError: the file was removed or damaged.
        """
        return self.record.read()

    def show(self, *, turn: int | None = None, tokens: bool = False, full: bool = False) -> None:
        """Print the trajectory: question and answer, the earlier turns that each prompt still showed, then each turn.

        Args:
            turn: details of this turn only, counted from 0.
            tokens: also the sampled tokens with their log-probabilities.
            full: whole texts.
        """
        theme.show(theme.console(), lambda _: self._parts(turn=turn, tokens=tokens, full=full))

    def _repr_html_(self) -> str:
        return _html(lambda _: self._parts())

    def __repr__(self) -> str:
        return f"Rollout({self.id!r}, correct={self.figures.correct:g}, stop={self.figures.stop.value!r})"

    def _views(self, *, tokens: bool = False) -> tuple[TurnView, ...]:
        """Its turns as they are shown, with their sampled ``tokens`` if requested."""
        return self.batch.open(self.record, tokens=tokens).turns

    def _parts(self, *, turn: int | None = None, tokens: bool = False, full: bool = False) -> Iterator[RenderableType]:
        views = self._views(tokens=tokens)
        credit = self.batch.group(self.record).credit_sentence(self.record)
        yield heading(self.record, self.trajectory.detail, credit=credit, full=full)
        yield Text()
        yield overview(views)
        shown = views if turn is None else views[turn : turn + 1]
        yield from details(shown, full=full, media=media_of(self.batch.file))


@concise_class
class Rollouts(Sequence[Rollout]):
    """The scored trajectories of one file, by groups and samples."""

    def __init__(self, batch: TrajectoryBatch) -> None:
        self.batch = batch
        self._rollouts = tuple(Rollout(batch, record) for record in batch.records())

    @overload
    def __getitem__(self, index: int) -> Rollout: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Rollout]: ...

    def __getitem__(self, index: int | slice) -> Rollout | Sequence[Rollout]:
        """The rollout at an index; several for a slice."""
        return self._rollouts[index]

    def __len__(self) -> int:
        return len(self._rollouts)

    def trajectories(self, library: Library | None = None) -> Any:  # noqa: ANN401  a DataFrame of either library
        """One row a trajectory: judgements, stop reason, sizes, reward parts, and the mean advantage of its turns."""
        return frame(self.trajectory_rows(), library)

    def turns(self, library: Library | None = None) -> Any:  # noqa: ANN401  a DataFrame of either library
        """One row a turn: tokens, what the condenser kept, dropped and rewrote, log-probability, advantage, weight."""
        return frame(self.turn_rows(), library)

    def trajectory_rows(self) -> list[Row]:
        """The rows of ``trajectories``."""
        return self._with_step(trajectory_row(rollout.record) for rollout in self)

    def turn_rows(self) -> list[Row]:
        """The rows of ``turns``."""
        return self._with_step(row for rollout in self for row in turn_rows(rollout.id, rollout._views()))

    def show(self) -> None:
        """Print a line for each."""
        theme.show(theme.console(), self._parts)

    def _repr_html_(self) -> str:
        return _html(self._parts)

    def __repr__(self) -> str:
        return f"Rollouts({len(self)})"

    def _with_step(self, rows: Iterable[Row]) -> list[Row]:
        return [{"step": self.batch.number, **row} for row in rows]

    def _parts(self, width: int) -> Iterator[RenderableType]:
        yield sibling_table("", [rollout.record for rollout in self], "", width)


def _html(parts: Callable[[int], Iterable[RenderableType]]) -> str:
    """The output for a notebook, as on a terminal with colours. Markup in texts is escaped."""
    console = theme.recorder()
    theme.show(console, parts)
    drawn = console.export_html(code_format=HTML, inline_styles=True)
    return re.sub("(?m) +(?=( |<[^>]*>)*$)", "", drawn)  # blanks at the ends of lines, as ``show``
