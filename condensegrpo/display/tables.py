"""Tables on a terminal: the first columns are text, the others figures."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from condensegrpo.display import theme

UNLIMITED = 10_000  # columns of a console


def table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    *,
    left: int = 1,
    padding: tuple[int, int, int, int] = (0, 1, 0, 0),
    lines: bool = False,
) -> Table:
    """A table without vertical lines, of which the first ``left`` columns are text; no title where it is empty.

    Args:
        lines: an empty line between rows, which tells rows of several lines apart.
    """
    drawn = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=padding,
        show_lines=lines,
        header_style="bold",
    )
    for index, head in enumerate(heads):
        drawn.add_column(head, justify="left" if index < left else "right", overflow="fold", no_wrap=index >= left)
    for row in rows:
        drawn.add_row(*row)
    return drawn


def show_fitting(console: Console, drawn: Table, *, heads: int = 1) -> None:
    """Print a table; where it is wider than the console, a paragraph for each row, headed by its first cells."""
    if console.measure(drawn, options=console.options.update(width=UNLIMITED)).maximum <= console.width:
        theme.show(console, lambda _: (drawn,))
    else:
        _show_paragraphs(console, drawn, heads)


def show_folding(console: Console, drawn: Table, *, heads: int = 1) -> None:
    """Print a table whose texts fold; where that does not make it fit, paragraphs, as ``show_fitting`` does."""
    if console.measure(drawn, options=console.options.update(width=UNLIMITED)).minimum <= console.width:
        theme.show(console, lambda _: (drawn,))
    else:
        _show_paragraphs(console, drawn, heads)


def _show_paragraphs(console: Console, drawn: Table, heads: int) -> None:
    if drawn.title:
        console.print(drawn.title, soft_wrap=True)
    headings = [str(column.header).replace("-\n", "").replace("\n", " ") for column in drawn.columns[heads:]]
    width = max(map(len, headings))
    for cells in zip(*(column.cells for column in drawn.columns), strict=True):
        console.print(": ".join(map(str, cells[:heads])), style=theme.HEAD, soft_wrap=True)
        for heading, cell in zip(headings, cells[heads:], strict=True):
            if cell:
                line = cell.replace("\n", "   ") if isinstance(cell, str) else cell
                console.print(Text.assemble(f"  {heading:{width}}  ", line), soft_wrap=True)
