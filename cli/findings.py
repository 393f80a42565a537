"""The findings of ``doctor``: a level for each checked area, and how to fix what is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table
from rich.text import Text

from condensegrpo.cli import theme
from condensegrpo.cli.neutral import neutral
from condensegrpo.core.wording import counted


class Level(StrEnum):
    """How serious a finding is."""

    OK = "ok"  # nothing to do
    WARNING = "warning"  # works, but slowly or not for every use
    PROBLEM = "problem"  # a run will fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    area: str
    level: Level
    found: str
    cure: str = ""


def ok(area: str, found: str) -> Finding:
    """A finding of level OK."""
    return Finding(area=area, level=Level.OK, found=found)


def warning(area: str, found: str, cure: str) -> Finding:
    """A finding of level WARNING."""
    return Finding(area=area, level=Level.WARNING, found=found, cure=cure)


def problem(area: str, found: str, cure: str) -> Finding:
    """A finding of level PROBLEM."""
    return Finding(area=area, level=Level.PROBLEM, found=found, cure=cure)


MARKS = {Level.OK: ("✓", theme.GOOD), Level.WARNING: ("!", theme.WARN), Level.PROBLEM: ("✗", theme.BAD)}


def show(findings: Sequence[Finding], console: Console) -> None:
    """One line a finding, its cure below it, and a closing count."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        mark, style = MARKS[finding.level]
        text = Text(neutral(finding.found))
        if finding.cure:
            text.append(f"\n→ {neutral(finding.cure)}", style)
        table.add_row(Text(mark, style), Text(finding.area, theme.DIM), text)
    console.print(table)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    warnings = counted(counts[Level.WARNING], "warning", "warnings")
    problems = counted(counts[Level.PROBLEM], "problem", "problems")
    console.print(Text(f"\n{counts[Level.OK]} ok, {warnings}, {problems}"))
