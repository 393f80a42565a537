"""Trackers: where the metrics of a run go, and what else a tracker may take. Standard library only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

Cell = str | int | float | None  # None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Named columns and rows of as many cells."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(self.columns)} columns has {len(row)} cells: {row!r:.200}")


def markdown(table: Table) -> str:
    """The table in GitHub's Markdown; a line break inside a cell is ``<br>``, and None is an empty cell."""
    lines = [_line(table.columns), _line("---" for _ in table.columns), *map(_line, table.rows)]
    return "".join(f"{line}\n" for line in lines)


def _line(cells: Iterable[Cell]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _text(cell: Cell) -> str:
    text = "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", "<br>")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What a tracker learns of a run that starts or is resumed."""

    name: str  # of the run's folder
    folder: Path  # the run's folder, for files of the tracker
    config: Mapping[str, object]  # the resolved configuration, without credentials
    step: int  # optimiser steps already taken
    recorded: int  # the last step of which records stay, −1: none; later ones may have been logged and are logged again
    identity: str | None  # what ``start`` returned when the run started first; None: a new run


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRun:
    """The run in the tracker."""

    identity: str  # by which ``start`` continues it
    location: str  # an address or folder, for the log


class Tracker:
    """Where metrics go.

    All methods are called in one thread, which is not the one that trains. What they raise is counted and shown once;
    training goes on.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        raise NotImplementedError

    def start(self, run: RunStart) -> StartedRun | None:
        """Open the tracker's run before the first metrics, or continue the one with ``run.identity``."""
        return None

    def log_table(self, step: int, name: str, table: Table) -> None:
        """Record a table, such as ``trajectories/held-out``: a sample of the trajectories of an evaluation."""

    def close(self) -> None:
        """Flush and free."""
