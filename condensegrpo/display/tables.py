"""Tables on a terminal: of text and figures, and the groups, siblings and matches of ``condensegrpo inspect``."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from condensegrpo.core.scored_trajectory import TrajectoryStats
from condensegrpo.core.wording import plural
from condensegrpo.display import theme
from condensegrpo.display.theme import one_line
from condensegrpo.inspection import records
from condensegrpo.inspection.records import Group, IndexedTrajectory

UNLIMITED = 10_000  # columns of a console
MOST_COMPONENTS = 5  # columns; the rest is in --json
WIDE = 110  # columns of a console that has room for everything
NARROW = 80  # columns of a console below which turns and advantages of groups are left out
DOTS = " … "  # between the ends of a range
CHOSEN = "▶"
QUALITIES = {"good": theme.GOOD, "bad": theme.BAD, "partial": theme.WARN}
HANDLED = {"mask": " (masked)", "penalise": " (penalised)"}  # shown after the stop reason


def table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    *,
    left: int = 1,
    padding: tuple[int, int, int, int] = (0, 1, 0, 0),
) -> Table:
    """A table without vertical lines, of which the first ``left`` columns are text; no title where it is empty."""
    drawn = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=padding,
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


def _sizes(width: int) -> tuple[str, ...]:
    """Headings of what a trajectory took, as many as a console of this width has room for."""
    if width < NARROW:
        return ("ctx", "price")
    return ("turns", "context", "output", "price") if width >= WIDE else ("turns", "context", "price")


def group_table(groups: Sequence[Group], chosen: str, width: int) -> Table:
    """One row for each group; groups that do not train say why.

    A narrow console has no question, ground truth and output, ranges without spaces, and a mark instead of the reason.
    """
    credited = any(group.signal is not None for group in groups)
    idle = f", {sum(group.signal is False for group in groups)} without signal" if credited else ""
    table = _table(f"{plural(len(groups), 'group')}{idle}")
    wide = width >= WIDE
    with_texts = wide and any(group.question is not None for group in groups)
    table.add_column("", no_wrap=True)
    dots = DOTS if wide else "…"
    table.add_column("group", overflow="fold", min_width=5)
    for heading in ("question", "ground truth")[: 2 * with_texts]:
        table.add_column(heading, overflow="fold")
    narrow = width < NARROW
    for heading in ("n", "correct", "score", *(["advantage"] if credited and not narrow else []), *_sizes(width)):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for group in groups:
        members = group.siblings
        figures = [sibling.figures for sibling in members]
        advantages = [sibling.advantage for sibling in members if sibling.advantage is not None]
        table.add_row(
            Text(CHOSEN if group.id == chosen else " ", theme.HEAD),
            Text(one_line(group.id, 48)),
            *([_known(group.question, 32), _known(group.ground_truth, 16)] if with_texts else []),
            str(len(members)),
            f"{group.success:.2f}" if group.was_scored else "–",
            _span([each.total for each in figures], ".3f", dots),
            *([_span(advantages, "+.2f", dots)] if credited and not narrow else []),
            *([] if narrow else [_span([each.turns for each in figures], "d", dots)]),
            _span([each.context_tokens for each in figures], "d", dots),
            *([_span([each.output_tokens for each in figures], "d", dots)] if wide else []),
            _span([each.price for each in figures], ".0f", dots),
            Text(f"○ {group.exclusion}"[: None if wide else 1] if group.exclusion else "", theme.WARN),
            style="bold" if group.id == chosen else "",
        )
    return table


def sibling_table(title: str, members: Sequence[IndexedTrajectory], chosen: str, width: int) -> Table:
    """One row for each trajectory. On a narrow console components, output and answer are left out."""
    wide = width >= WIDE
    table = _table(title)
    parts = dict.fromkeys(name for sibling in members for name in sibling.figures.components)
    names = list(parts)[: MOST_COMPONENTS * wide]
    credited = any(sibling.advantages is not None for sibling in members)
    table.add_column("", no_wrap=True)
    table.add_column("#", justify="right", no_wrap=True)
    narrow = width < NARROW
    table.add_column("id" if narrow else "trajectory", overflow="fold", min_width=6 if narrow else 10)
    table.add_column("", no_wrap=True)
    shown = (one_line(name, 14) for name in names)
    for heading in ("score", *shown, *(["advantage"] if credited else []), *_sizes(width)):
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for heading in ("stop", "answer")[: 1 + wide]:
        table.add_column(heading, overflow="fold")
    largest = max((abs(sibling.advantage) for sibling in members if sibling.advantage is not None), default=0.0)
    for sibling in members:
        figures = sibling.figures
        table.add_row(
            Text(CHOSEN if sibling.id == chosen else " ", theme.HEAD),
            Text(str(sibling.number), theme.DIM),
            Text(one_line(sibling.id, 60)),
            verdict_text(figures) if wide else verdict_text(figures)[:1],
            f"{figures.total:.3f}",
            *(f"{figures.components[name]:.3g}" if name in figures.components else "–" for name in names),
            *([advantage(sibling, largest, "…" if narrow else DOTS)] if credited else []),
            *([] if narrow else [str(figures.turns)]),
            str(figures.context_tokens),
            *([str(figures.output_tokens)] if wide else []),
            f"{figures.price:.0f}",
            Text(
                f"{figures.stop}{HANDLED.get(sibling.handling or '', '')}",
                "" if figures.stop.gives_answer else theme.WARN,
            ),
            *([_known(sibling.answer, 24)] if wide else []),
            style="bold" if sibling.id == chosen else "",
        )
    return table


def verdict_text(figures: TrajectoryStats) -> Text:
    """Correct, wrong, partly correct or malformed, as a mark and a word."""
    text, quality = records.verdict(figures)
    return Text(text, QUALITIES[quality])


def advantage(sibling: IndexedTrajectory, largest: float, dots: str = DOTS) -> Text:
    """The advantage, or its range where the turns differ."""
    if sibling.advantages is None or sibling.advantage is None:
        return Text("–", theme.DIM)
    return Text(_span(sibling.advantages, "+.2f", dots), theme.signed_style(sibling.advantage, largest))


def _known(text: str | None, width: int) -> Text:
    return Text("–", theme.DIM) if text is None else Text(one_line(text, width))


def _table(title: str) -> Table:
    return Table(
        title=Text(title, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        header_style=theme.DIM,
        padding=(0, 1, 0, 0),
    )


def _span(values: Sequence[float], form: str, dots: str) -> str:
    """One value, or the least and the greatest; as they look after rounding."""
    if not values:
        return "–"
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low}{dots}{high}"
