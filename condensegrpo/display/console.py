"""The console of a run: progress at the bottom of a terminal, plain lines in a pipe, and a row for each step.

docs/reference/metrics.md says what the columns are.
"""

import os
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self, TextIO, TypeVar

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from condensegrpo.core.observer import Observer
from condensegrpo.display.run_log import WIDTH, StepTable, evaluation_line
from condensegrpo.display.theme import EscapingConsole, as_typed, neutral

if TYPE_CHECKING:
    from condensegrpo.core.evaluation import Evaluation

T = TypeVar("T")

STATUS_SECONDS = 30.0  # between two lines of progress where there is no terminal
INDENT = " " * len("15:04:05  ")


class Counts(ProgressColumn):
    """``33/150  0:00:05, 0:00:17 left``, or the time alone where the total is not known."""

    def render(self, task: Task) -> Text:
        """The text of a task."""
        passed = timedelta(seconds=int(task.elapsed or 0))
        if task.total is None:
            return Text(f"{passed}")
        left = "" if task.time_remaining is None else f", {timedelta(seconds=int(task.time_remaining))} left"
        return Text(f"{task.completed:.0f}/{task.total:.0f}  {passed}{left}")


class _Display(Progress):
    """Progress with a notice below it: a line that a signal handler printed would be drawn over."""

    notice = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The tasks, then the notice."""
        yield from super().get_renderables()
        if self.notice:
            yield Text(self.notice, style="bold")


class PhaseDisplay(Observer):
    """Shows the current phase and its progress on a terminal; nothing elsewhere."""

    def __init__(self, console: Console, *, debug: bool | None = None) -> None:
        """``debug`` shows the traceback of a failure as well; None: so it does not, and there is no option to name."""
        self._console, self._debug = console, debug
        self.progress = _Display(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            Counts(),
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

    def counted(self, parts: Iterable[T]) -> Iterator[T]:
        """The parts of the phase, each counted as done once the next one is taken."""
        for part in parts:
            yield part
            self.advance()

    def announce(self, text: str) -> bool:
        """Show a notice below the display from now on, if there is one; only sets it, for signal handlers."""
        self.progress.notice = text
        return self._console.is_terminal and self.progress.live.is_started

    def trajectories_failed(self, text: str, traceback: str) -> None:
        """Say which trajectories failed, and how."""
        hint = " (--debug shows the traceback)" if traceback and self._debug is False else ""
        self.notice(neutral(f"{text}\n{traceback}".rstrip() if self._debug else f"{text}{hint}"))

    def notice(self, text: str) -> None:
        """Print a line above the display."""
        self.progress.console.print(Text(as_typed(text)))


@contextmanager
def waiting_for(title: str, *, quiet: bool = False, debug: bool = False) -> Iterator[PhaseDisplay]:
    """Show the title of work that may take seconds, on a terminal, until it is done, unless ``quiet``."""
    with PhaseDisplay(EscapingConsole(stderr=True, quiet=quiet), debug=debug) as display:
        display.phase(title, None)
        yield display


@contextmanager
def loading(what: str, *, quiet: bool = False, debug: bool = False) -> Iterator[PhaseDisplay]:
    """Show that a command loads ``what``; libraries show no progress of their own from then on."""
    with waiting_for(f"loading {what}", quiet=quiet, debug=debug) as display:
        quiet_libraries()
        yield display


class TrainingConsole(PhaseDisplay):
    """Shows a training run on a terminal, or as plain lines where there is none."""

    def __init__(
        self,
        *,
        steps: int,
        stream: TextIO | None = None,
        debug: bool | None = None,
        status_seconds: float = STATUS_SECONDS,
    ) -> None:
        super().__init__(EscapingConsole(file=stream or sys.stdout, highlight=False, soft_wrap=True), debug=debug)
        self._steps, self._status_seconds = steps, status_seconds
        self._table = StepTable(steps)
        self._training: TaskID | None = None
        self._title, self._done = "", 0
        self._total: int | None = None
        self._spoke = time.monotonic()

    def notice(self, text: str, style: str = "") -> None:
        """Print some lines after the time, which a terminal wraps between words."""
        width = self._console.width if self._console.is_terminal else sys.maxsize
        for line in f"{datetime.now():%H:%M:%S}  {as_typed(text)}".split("\n"):
            self._console.print(Text(_wrapped(line, width), style))
        self._spoke = time.monotonic()

    def phase(self, title: str, total: int | None) -> None:
        """Start a phase. Without a terminal, a phase outside the steps prints a line."""
        super().phase(title, total)
        self._title, self._total, self._done = title, total, 0
        if not self._console.is_terminal and not title.startswith("step "):
            self.notice(f"{title} …")

    def advance(self, note: str = "") -> None:
        """Count one part of the phase as done. Without a terminal, print how far it is now and then."""
        super().advance(note)
        self._done += 1
        if not self._console.is_terminal and time.monotonic() - self._spoke > self._status_seconds:
            self.notice(f"{self._title}: {self._done} of {self._total}{f', {note}' if note else ''}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a row of the table."""
        if self._training is None:
            self._training = self.progress.add_task("[bold]training", total=self._steps, note="", completed=step - 1)
        self.progress.update(self._training, completed=step)
        *headed, row = self._table.lines(step, metrics, self._console.width if self._console.is_terminal else WIDTH)
        if headed:
            self._console.print(Text("\n".join(headed), style="bold"))
        self._console.print(Text(row))
        self._spoke = time.monotonic()

    def evaluated(self, step: int, evaluations: "Sequence[Evaluation]") -> None:
        """Print a line for each evaluation."""
        for result in evaluations:
            self.notice(evaluation_line(step, result), style="cyan")


def _wrapped(line: str, width: int) -> str:
    """A line on as many lines as it needs, broken between words only: paths and commands stay whole."""
    if len(line) <= width:
        return line
    indent = INDENT if line.lstrip() == line else " " * 4
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def quiet_libraries() -> None:
    """Turn off the progress bars of libraries, before models are loaded; warnings and errors are still shown.

    datasets takes half a second to import, and only some tasks do: it reads the variable then.
    """
    if find_spec("torch") is None:  # transformers advises to install it, which what runs here does not need
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if "datasets" in sys.modules:
        from datasets.utils.logging import disable_progress_bar as disable_progress_bar_of_datasets

        disable_progress_bar_of_datasets()
