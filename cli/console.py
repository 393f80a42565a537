"""The console of a run: a live progress display below, one line a step above it, and all of it with times in log.txt.

A terminal shows as many columns as fit; log.txt and pipes get all of them. The headings are
explained in docs/reference/metrics.md.
"""

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from condensegrpo.cli.neutral import neutral
from condensegrpo.core.observer import Observer
from condensegrpo.core.wording import counted
from condensegrpo.storage.files import write_error

if TYPE_CHECKING:
    from condensegrpo.core.evaluation import Evaluation


class Column(NamedTuple):
    """One metric in a step's row."""

    heading: str  # of at most two words, which stand below each other
    metric: str
    form: str  # format of a value
    width: int  # characters, of the usual values and of both words
    rank: int  # a narrow terminal omits the highest ranks first


COLUMNS = (
    Column("success", "success", "{:.2f}", 7, 1),
    Column("reward", "reward", "{:.3f}", 6, 2),
    Column("valid format", "format_valid", "{:.2f}", 6, 14),
    Column("context tokens", "context_tokens", "{:.1f}", 7, 3),
    Column("turns", "turns", "{:.1f}", 5, 8),
    Column("output tokens", "output_tokens", "{:.0f}", 6, 15),
    Column("no signal", "groups_of_equal_reward", "{:.2f}", 6, 6),
    Column("groups dropped", "groups_dropped", "{:.2f}", 7, 16),
    Column("masked", "masked", "{:.2f}", 6, 11),
    Column("no grad", "trajectories_without_advantage", "{:.2f}", 4, 5),
    Column("correct adv<0", "correct_with_negative_advantage", "{:.2f}", 7, 7),
    Column("weight correct", "weight/correct", "{:.2f}", 7, 12),
    Column("weight Gini", "weight/gini", "{:.2f}", 6, 13),
    Column("policy ratio", "ratio", "{:.4f}", 6, 10),
    Column("grad norm", "grad_norm", "{:.1e}", 7, 4),
    Column("step seconds", "seconds", "{:.1f}", 7, 9),
)
GAP = 2  # spaces before every column
STEP_WIDTH = 4  # characters of the step's number
HEADING_EVERY = 20  # rows


class PhaseDisplay(Observer):
    """Shows the current phase and its progress on a terminal; nothing elsewhere."""

    def __init__(self, console: Console, *, debug: bool = False) -> None:
        """``debug`` shows the traceback of a failure as well."""
        self._debug = debug
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._phase: TaskID | None = None

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def phase(self, title: str, total: int | None) -> None:
        """Start a phase, which replaces the last one."""
        if self._phase is not None:
            self.progress.remove_task(self._phase)
        self._phase = self.progress.add_task(title, total=total, note="")

    def advance(self, note: str = "") -> None:
        """Count one part of the phase as done."""
        if self._phase is not None:
            self.progress.update(self._phase, advance=1, note=note)

    def failed(self, text: str, traceback: str) -> None:
        """Say which trajectories failed, and how."""
        hint = " (--debug shows the traceback)" if traceback else ""
        self.say(neutral(f"{text}\n{traceback}".rstrip() if self._debug else f"{text}{hint}"))

    def say(self, text: str) -> None:
        """Print a line above the display."""
        self.progress.console.print(Text(text))


class TrainingConsole(PhaseDisplay):
    """Shows a training run on a terminal, or as plain lines where there is none, and writes it to log.txt."""

    def __init__(self, *, steps: int, log: Path, stream: TextIO | None = None, debug: bool = False) -> None:
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        super().__init__(self._console, debug=debug)
        self._log = log.open("ab", buffering=0)  # a line that cannot be written fails here, not when it is closed
        self._steps = steps
        self._training: TaskID | None = None
        self._rows = 0
        self._shown: tuple[Column, ...] = ()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._log.close()

    def say(self, text: str, style: str = "") -> None:
        """Print a line and log it."""
        self._console.print(Text(text, style))
        self.record(text)

    def record(self, text: str) -> None:
        """Write to log.txt alone, with the local time before every line."""
        time = datetime.now().astimezone().isoformat(" ", "seconds")
        lines = "".join(f"{time}  {line}\n" for line in Text(text).plain.split("\n"))
        try:
            self._log.write(lines.encode())
        except OSError as error:
            raise write_error(Path(self._log.name), error) from error

    def phase(self, title: str, total: int | None) -> None:
        """Start a phase. Without a terminal, a phase outside the steps prints a line."""
        super().phase(title, total)
        if not self._console.is_terminal and not title.startswith("step "):
            self.say(f"{title} …")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a row of the table."""
        if self._training is None:
            self._training = self.progress.add_task("[bold]training", total=self._steps, note="")
        self.progress.update(self._training, completed=step)
        shown = fitting(self._console.width) if self._console.is_terminal else COLUMNS
        due = self._rows % HEADING_EVERY == 0
        if due or shown != self._shown:
            self._console.print(Text(headings(shown), style="bold"))
        if due:
            self.record(headings(COLUMNS))
        self._console.print(Text(row(step, metrics, shown)))
        self.record(row(step, metrics, COLUMNS))
        self._shown = shown
        self._rows += 1

    def evaluated(self, step: int, evaluations: "Sequence[Evaluation]") -> None:
        """Print a line for each evaluation."""
        for result in evaluations:
            self.say(
                f"after {counted(step, 'step', 'steps')}, {result.name}: success {result.success:.3f} "
                f"[{result.success_low:.3f}, {result.success_high:.3f}], "
                f"largest context {result.metrics['context_tokens']:.1f} tokens, {result.metrics['turns']:.1f} turns; "
                f"{counted(result.problems, 'problem', 'problems')}, {result.seconds:.1f} s",
                style="cyan",
            )


def fitting(width: int) -> tuple[Column, ...]:
    """The columns that fit a terminal of ``width`` characters: the highest ranks are omitted first."""
    shown = sorted(COLUMNS, key=lambda column: column.rank)
    while shown and STEP_WIDTH + sum(GAP + column.width for column in shown) > width:
        shown.pop()
    return tuple(column for column in COLUMNS if column in shown)


def headings(columns: Sequence[Column]) -> str:
    """The two lines above the steps' rows; a single word stands in the second."""
    words = [("", *column.heading.split())[-2:] for column in columns]
    upper, lower = ([pair[line] for pair in words] for line in (0, 1))
    return f"{_line('', upper, columns)}\n{_line('step', lower, columns)}"


def row(step: int, metrics: Mapping[str, float], columns: Sequence[Column]) -> str:
    """The line of a step; a dash where a metric was not measured."""
    cells = [column.form.format(metrics[column.metric]) if column.metric in metrics else "–" for column in columns]
    return _line(str(step), cells, columns)


def _line(first: str, cells: Sequence[str], columns: Sequence[Column]) -> str:
    padded = (f"{cell:>{column.width}}" for cell, column in zip(cells, columns, strict=True))
    return f"{first:>{STEP_WIDTH}}" + "".join(" " * GAP + cell for cell in padded)
