"""A condensation at a glance: a strip of the earlier turns that each prompt shows, and a bar of its make-up.

0  1  2        context of 64 tokens
▸              ██████████··························
■■ ▸           ██████████■■■■■◆◆···················
░░ ■■ ▸        ██████████■■■■◆◆░░░░░░░·············
"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from condensegrpo.core.trajectory import SpanStatus
from condensegrpo.display import theme
from condensegrpo.inspection.panes import ContextView

BAR_WIDTH = 34  # cells
STRIP_WIDTH = 40  # cells, at most


class Mark(NamedTuple):
    """The drawing of a part; the shapes alone tell the parts apart."""

    glyph: str
    style: str
    word: str


PINNED = Mark("█", theme.HEAD, "pinned")
KEPT = Mark("■", theme.KEPT, "kept")
REWRITTEN = Mark("▒", theme.REWRITTEN, "rewritten")
NEWEST = Mark("◆", theme.NEWEST, "newest observation")
DROPPED = Mark("░", theme.DROPPED, "dropped")
FREE = Mark("·", theme.FREE, "free")
STATUS_MARKS = {SpanStatus.KEPT: KEPT, SpanStatus.REWRITTEN: REWRITTEN, SpanStatus.DROPPED: DROPPED}
HERE = "▸"
BURST = "»"


def legend(budget: int) -> theme.Flow:
    """The meaning of the marks."""
    free = FREE._replace(word=f"free, of {budget} tokens")
    return words_of(PINNED, KEPT, REWRITTEN, NEWEST, DROPPED, free)


def words_of(*marks: Mark) -> theme.Flow:
    """Marks with their words."""
    return theme.Flow(Text.assemble((f"{mark.glyph} ", mark.style), (mark.word, theme.DIM)) for mark in marks)


class FittingBar:
    """A ``bar`` in a table: as wide as the other columns leave room for."""

    def __init__(self, view: ContextView) -> None:
        self._view = view

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        yield bar(self._view, min(BAR_WIDTH, options.max_width))

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, BAR_WIDTH).clamp(max_width=options.max_width)


def bar(view: ContextView, width: int = BAR_WIDTH) -> Text:
    """The make-up of one prompt against the budget, or against its own length if that is larger.

    Dropped tokens are drawn where they would have stood, up to a » where they would have burst the budget.
    """
    ghost = min(view.saved, view.free)
    *shown, (_, free) = parts(view)
    cells_of = [*shown, (DROPPED, ghost), (FREE, free - ghost)]
    text = Text()
    for (mark, _), cells in zip(cells_of, shares([tokens for _, tokens in cells_of], width), strict=True):
        text.append(mark.glyph * cells, mark.style)
    if view.saved > view.free > 0:
        text.right_crop(1)
        text.append(BURST, DROPPED.style)
    return text


def parts(view: ContextView) -> tuple[tuple[Mark, int], ...]:
    """The marks and tokens of the parts of a prompt, the free tokens last."""
    return (
        (PINNED, view.pinned),
        (KEPT, view.kept),
        (REWRITTEN, view.rewritten),
        (NEWEST, view.newest),
        (FREE, view.free),
    )


def shares(amounts: Sequence[int], width: int) -> list[int]:
    """``width`` cells in proportion to amounts; every amount above 0 gets at least one, taken from the widest."""
    total = sum(amounts)
    if total == 0:
        return [0] * len(amounts)
    exact = [amount * width / total for amount in amounts]
    cells = [max(int(share), 1 if amount else 0) for share, amount in zip(exact, amounts, strict=True)]
    while sum(cells) > width:
        cells[max(range(len(cells)), key=lambda cell: cells[cell])] -= 1
    while sum(cells) < width:
        cells[max(range(len(cells)), key=lambda cell: exact[cell] - cells[cell])] += 1
    return cells


def cell_width(units: int, room: int = STRIP_WIDTH) -> int:
    """Cells that a unit takes in a strip, the gap after it included."""
    return 3 if units * 3 <= room else 2 if units * 2 <= room else 1


def strip(view: ContextView, units: int, room: int = STRIP_WIDTH) -> Text:
    """The status of every unit before a prompt, one cell each, a mark for the turn itself, and what condensing added.

    ``units`` is the number of columns of the whole strip; of more than have room, the newest are shown.
    """
    width, first = cell_width(units, room), max(0, units - room)
    text = Text("…" if first else "", theme.DIM)
    for column in range(first, view.turn):
        mark = STATUS_MARKS[view.statuses[column]] if column in view.statuses else FREE
        text.append((mark.glyph * max(1, width - 1)).ljust(width), mark.style)
    return text.append(HERE, "bold").append(f" +{view.grown}" if view.grown else "", REWRITTEN.style)


def ruler(units: int) -> Text:
    """The turn numbers above the strips, as many as have room."""
    width, first = cell_width(units), max(0, units - STRIP_WIDTH)
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if step * width > len(str(units)))
    line = [" "] * (STRIP_WIDTH + 8)
    for column in range(first, units):
        if column % every == 0:
            start = (column - first) * width + bool(first)
            line[start : start + len(str(column))] = str(column)
    return Text("".join(line).rstrip(), theme.DIM)
