"""The tables of ``inspect-trajectory``: groups, siblings, matches."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from condensegrpo.cli import theme
from condensegrpo.cli.inspection import Group, Sibling
from condensegrpo.cli.neutral import counted, one_line
from condensegrpo.core.trajectory import Stop

MOST_COMPONENTS = 5  # columns; the rest is in --json
MOST_MATCHES = 20  # rows
WIDE = 110  # columns of a console that has room for everything
CHOSEN = "▶"


def group_table(groups: Sequence[Group], chosen: str) -> Table:
    """One row a group; those that nothing is learned from say why."""
    table = _table(
        f"{counted(len(groups), 'group', 'groups')}, {sum(not group.signal for group in groups)} without signal"
    )
    for heading in ("", "group", "n"):
        table.add_column(heading, justify="right" if heading == "n" else "left", overflow="fold")
    for heading in ("correct", "score", "advantage", "turns", "context", "output"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for group in groups:
        members = group.siblings
        table.add_row(
            _marker(group.id == chosen),
            Text(one_line(group.id, 48)),
            str(len(members)),
            f"{sum(one.correct for one in members) / len(members):.2f}",
            _span([one.score for one in members], ".3f"),
            _span([one.advantage for one in members if one.advantage is not None], "+.2f"),
            _span([one.turns for one in members], "d"),
            _span([one.context for one in members], "d"),
            _span([one.output for one in members], "d"),
            Text(f"○ {group.idle}" if group.idle else "", theme.WARN),
            style="bold" if group.id == chosen else "",
        )
    return table


def sibling_table(title: str, members: Sequence[Sibling], chosen: str, width: int) -> Table:
    """One row a trajectory. On a narrow console the components and the answer are left out."""
    wide = width >= WIDE
    table = _table(title)
    names = list(dict.fromkeys(name for one in members for name in one.components))[: MOST_COMPONENTS * wide]
    table.add_column("", no_wrap=True)
    table.add_column("trajectory", overflow="fold", min_width=12)
    table.add_column("", no_wrap=True)
    for heading in ("score", *(one_line(name, 14) for name in names), "advantage", "turns", "context", "output"):
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for heading in ("stop", "answer")[: 1 + wide]:
        table.add_column(heading, overflow="fold")
    largest = max((abs(one.advantage) for one in members if one.advantage is not None), default=0.0)
    for one in members:
        answer = Text(one_line(one.answer, 24)) if one.answer is not None else Text("–", theme.DIM)
        table.add_row(
            _marker(one.id == chosen),
            Text(one_line(one.id, 60)),
            verdict(one) if wide else verdict(one)[:1],
            f"{one.score:.3f}",
            *(f"{one.components[name]:.3g}" if name in one.components else "–" for name in names),
            advantage(one, largest),
            str(one.turns),
            str(one.context),
            str(one.output),
            Text(_stop(one), "" if Stop(one.stop).gives_answer else theme.WARN),
            *([answer] if wide else []),
            style="bold" if one.id == chosen else "",
        )
    return table


def match_table(matches: Sequence[Sibling], asked: str, chosen: str, width: int) -> Table:
    """The first of the trajectories that were asked for, in the order that was asked for."""
    more = f", the first {MOST_MATCHES}" if len(matches) > MOST_MATCHES else ""
    return sibling_table(
        f"{counted(len(matches), 'trajectory', 'trajectories')}{asked}{more}", matches[:MOST_MATCHES], chosen, width
    )


def verdict(one: Sibling) -> Text:
    """Correct, wrong, partly correct or malformed, as a mark and a word."""
    if not one.format:
        return Text("✗ malformed", theme.BAD)
    if one.correct >= 1:
        return Text("✓ correct", theme.GOOD)
    return Text("✗ wrong", theme.BAD) if one.correct <= 0 else Text(f"◐ {one.correct:.2f}", theme.WARN)


def advantage(one: Sibling, largest: float) -> Text:
    """The advantage, or its range where the turns differ."""
    if one.advantages is None or one.advantage is None:
        return Text("–", theme.DIM)
    return Text(_span(one.advantages, "+.2f"), theme.signed_style(one.advantage, largest))


def _stop(one: Sibling) -> str:
    """Why it ended, and what training made of that."""
    made = {"mask": " (masked)", "penalise": " (penalised)"}
    return one.stop + made.get(one.handling or "", "")


def _table(title: str) -> Table:
    return Table(
        title=Text(title, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        header_style=theme.DIM,
        padding=(0, 1, 0, 0),
    )


def _marker(chosen: bool) -> Text:
    return Text(CHOSEN if chosen else " ", theme.HEAD)


def _span(values: Sequence[float], form: str) -> str:
    """One value, or the least and the greatest; as they look after rounding."""
    if not values:
        return "–"
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} … {high}"
