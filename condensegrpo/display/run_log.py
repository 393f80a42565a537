"""The table of a training run, and what a run writes beside the console: log.txt, and JSON lines for ``--json``.

The table has a row for each step, in words that need no legend, at most as wide as requested: the columns that fit stay
the same from the first step to the last.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TextIO

from condensegrpo.core.observer import Observer
from condensegrpo.core.wording import plural
from condensegrpo.display.theme import neutral
from condensegrpo.storage.files import open_here, writing

if TYPE_CHECKING:
    from condensegrpo.core.evaluation import Evaluation

WIDTH = 100  # characters where there is no terminal, and of log.txt
GAP = 2  # spaces before every column but the first
HEADING_EVERY = 20  # rows
PACE = 20  # rows whose mean duration predicts the time left


class Column(NamedTuple):
    """A figure in the row of a step."""

    heading: tuple[str, ...]  # of at most three words, which stand below each other
    metric: str  # or the name of what ``StepTable`` adds to the metrics
    form: str  # format of a value
    width: int  # characters, of the usual values and of every word
    rank: int  # a narrow table omits the highest ranks first


COLUMNS = (
    Column(("time",), "time", "{}", 8, 8),
    Column(("step",), "step", "{}", 7, 0),
    Column(("success",), "success", "{:.2f}", 7, 1),
    Column(("reward",), "reward", "{:.3f}", 6, 6),
    Column(("valid", "format"), "format_valid", "{:.0%}", 6, 13),
    Column(("context", "tokens"), "context_tokens", "{:.1f}", 7, 2),
    Column(("turns",), "turns", "{:.1f}", 5, 10),
    Column(("output", "tokens"), "output_tokens", "{:.0f}", 6, 12),
    Column(("price",), "price", "{:.0f}", 8, 3),
    Column(("groups", "without", "signal"), "groups_of_equal_reward", "{:.0%}", 7, 4),
    Column(("groups", "dropped"), "groups_dropped", "{:.0%}", 7, 15),
    Column(("masked",), "masked", "{:.0%}", 6, 14),
    Column(("samples", "without", "gradient"), "trajectories_without_advantage", "{:.0%}", 8, 17),
    Column(("correct,", "negative", "advantage"), "correct_with_negative_advantage", "{:.0%}", 9, 9),
    Column(("policy", "ratio"), "ratio", "{:.4f}", 6, 18),
    Column(("gradient", "norm"), "grad_norm", "{:.2g}", 8, 11),
    Column(("step", "seconds"), "seconds", "{:.1f}", 7, 16),
    Column(("tokens", "per s"), "tokens per s", "{:.0f}", 6, 7),
    Column(("time", "left"), "time left", "{}", 8, 5),
)


class StepTable:
    """The rows of a run of some steps, under headings that come again after ``HEADING_EVERY`` rows."""

    def __init__(self, steps: int, *, omitted: Iterable[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        """Make the table.

        Args:
            omitted: columns that are never shown, by their metrics.
            clock: seconds, for the time left.
        """
        self._steps, self._clock = steps, clock
        self._columns = tuple(column for column in COLUMNS if column.metric not in omitted)
        self._shown: tuple[Column, ...] = ()
        self._rows = 0  # since the last headings
        self._ends: deque[float] = deque(maxlen=PACE + 1)

    def lines(self, step: int, metrics: Mapping[str, float], width: int) -> list[str]:
        """The row of a step, after headings where they are due; a dash where a metric was not measured."""
        values = {"time": f"{datetime.now():%H:%M:%S}", "step": f"{step}/{self._steps}", **metrics}
        values["time left"] = self._left(step, metrics)
        if "seconds" in metrics:
            sampled = metrics.get("trajectories", 0.0) * metrics.get("output_tokens", 0.0)
            values["tokens per s"] = sampled / metrics["seconds"]
        shown, headed = fitting(width, self._columns), list[str]()
        if shown != self._shown or self._rows == HEADING_EVERY:  # another width, or a screen full
            headed, self._shown, self._rows = headings(shown), shown, 0
        self._rows += 1
        cells = [column.form.format(values[column.metric]) if column.metric in values else "–" for column in shown]
        return [*headed, _line(cells, shown)]

    def _left(self, step: int, metrics: Mapping[str, float]) -> str:
        """The predicted time to the last step, evaluations included: ``0:01:40``."""
        self._ends.append(self._clock())
        rows = len(self._ends) - 1
        each = (self._ends[-1] - self._ends[0]) / rows if rows else metrics.get("seconds", 0.0)
        return str(timedelta(seconds=round(each * (self._steps - step))))


def fitting(width: int, columns: Sequence[Column]) -> tuple[Column, ...]:
    """The columns that fit into ``width`` characters: the highest ranks are omitted first."""
    shown = sorted(columns, key=lambda column: column.rank)
    while len(shown) > 1 and sum(GAP + column.width for column in shown) - GAP > width:
        shown.pop()
    return tuple(column for column in columns if column in shown)


def headings(columns: Sequence[Column]) -> list[str]:
    """The lines above the rows; the last words stand in the last."""
    deep = max(len(column.heading) for column in columns)
    words = [("",) * (deep - len(column.heading)) + column.heading for column in columns]
    return [_line([word[line] for word in words], columns) for line in range(deep)]


def _line(cells: Sequence[str], columns: Sequence[Column]) -> str:
    padded = (f"{cell:>{column.width}}" for cell, column in zip(cells, columns, strict=True))
    return (" " * GAP).join(padded).rstrip()


class RunLog(Observer):
    """Writes log.txt, a line at a time with its local time; knows what the run is doing."""

    def __init__(self, path: Path, *, steps: int) -> None:
        with writing(path):
            self._file = open_here(path, "ab", buffering=0)  # a failed write raises here, not when it is closed
        self._table = StepTable(steps, omitted=("time",))
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def doing(self) -> str:
        """The work that a run finishes before it stops and saves, such as ``step 10``."""
        if self._phase.startswith("step "):
            return self._phase.partition(":")[0]
        if self._phase.startswith("evaluating "):
            return f"the evaluation {self._phase.removeprefix('evaluating ')}"
        return "a step of the warm start" if self._phase.startswith("warm start") else "the step"

    def log_lines(self, text: str) -> None:
        """Write some lines."""
        now = timestamp()
        with writing(Path(self._file.name)):
            self._file.write("".join(f"{now}  {line}\n" for line in neutral(text).split("\n")).encode())

    def notice(self, text: str) -> None:
        """Write what happened."""
        self.log_lines(text)

    def phase(self, title: str, total: int | None) -> None:
        """Write what begins, unless it is part of a step."""
        self._phase = title
        if not title.startswith("step "):
            self.log_lines(f"{title} …")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the row of a step."""
        self.log_lines("\n".join(self._table.lines(step, metrics, WIDTH)))

    def evaluated(self, step: int, evaluations: "Sequence[Evaluation]") -> None:
        """Write a line for each evaluation."""
        self.log_lines("\n".join(evaluation_line(step, result) for result in evaluations))

    def trajectories_failed(self, text: str, traceback: str) -> None:
        """Write which trajectories failed, and how, with the traceback."""
        self.log_lines(f"{text}\n{traceback}".rstrip())


class JsonLines(Observer):
    """Writes one JSON object a line to standard output: ``event``, ``time``, and what the event is about."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def emit(self, event: str, **fields: object) -> None:
        """Write an event."""
        # ASCII: a terminal obeys U+009B
        self._stream.write(json.dumps({"event": event, "time": timestamp(), **fields}) + "\n")
        self._stream.flush()

    def phase(self, title: str, total: int | None) -> None:
        """A wait begins."""
        self.emit("phase", title=title, total=total)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step was taken."""
        self.emit("step", step=step, metrics=dict(metrics))

    def evaluated(self, step: int, evaluations: "Sequence[Evaluation]") -> None:
        """The policy was evaluated; an event for each evaluation."""
        for result in evaluations:
            self.emit("evaluation", step=step, **asdict(result))

    def trajectories_failed(self, text: str, traceback: str) -> None:
        """Trajectories failed."""
        self.emit("failure", text=text, traceback=traceback)

    def notice(self, text: str) -> None:
        """Something happened."""
        self.emit("message", text=text)


def timestamp() -> str:
    """The local time with its offset: ``2026-11-22 15:04:05+01:00``."""
    return datetime.now().astimezone().isoformat(" ", "seconds")


def evaluation_line(step: int, result: "Evaluation") -> str:
    """An evaluation in words, context and price in tokens; its provenance is in ``evaluations/``."""
    return (
        f"after {plural(step, 'step')}, {result.name}: success {result.success:.3f} "
        f"[{result.success_low:.3f}, {result.success_high:.3f}], "
        f"context {result.metrics['context_tokens']:.1f}, price {result.metrics['price']:.0f}, "
        f"{result.seconds:.3g} s"
    )
