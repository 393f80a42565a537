"""A small table of values, as trackers and model cards show it. Standard library only."""

from collections.abc import Iterable
from dataclasses import dataclass

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
