"""What a run writes for later and for programs: log.txt with times, and one JSON object a line for ``--json``."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from condensegrpo.core.observer import Observer
from condensegrpo.core.wording import counted
from condensegrpo.display.neutral import neutral
from condensegrpo.display.step_table import WIDTH, StepTable
from condensegrpo.storage.files import writing

if TYPE_CHECKING:
    from condensegrpo.core.evaluation import Evaluation


class RunLog(Observer):
    """Writes log.txt, a line at a time with its local time; knows what the run is doing."""

    def __init__(self, path: Path, *, steps: int) -> None:
        self._file = path.open("ab", buffering=0)  # a line that cannot be written fails here, not when it is closed
        self._table = StepTable(steps, omitted=("time",))
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def doing(self) -> str:
        """What ends before a run that is to stop saves: ``step 10``."""
        if self._phase.startswith("step "):
            return self._phase.partition(":")[0]
        if self._phase.startswith("evaluating "):
            return f"the evaluation {self._phase.removeprefix('evaluating ')}"
        return "a step of the warm start" if self._phase.startswith("warm start") else "the step"

    def record(self, text: str) -> None:
        """Write some lines."""
        now = timestamp()
        with writing(Path(self._file.name)):
            self._file.write("".join(f"{now}  {line}\n" for line in neutral(text).split("\n")).encode())

    def say(self, text: str) -> None:
        """Write what happened."""
        self.record(text)

    def phase(self, title: str, total: int | None) -> None:
        """Write what begins, unless it is part of a step."""
        self._phase = title
        if not title.startswith("step "):
            self.record(f"{title} …")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the row of a step."""
        self.record("\n".join(self._table.lines(step, metrics, WIDTH)))

    def evaluated(self, step: int, evaluations: "Sequence[Evaluation]") -> None:
        """Write a line for each evaluation."""
        self.record("\n".join(evaluation_line(step, result) for result in evaluations))

    def failed(self, text: str, traceback: str) -> None:
        """Write which trajectories failed, and how, with the traceback."""
        self.record(f"{text}\n{traceback}".rstrip())


class JsonLines(Observer):
    """Writes one JSON object a line to standard output: ``event``, ``time``, and what the event is about."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def emit(self, event: str, **fields: object) -> None:
        """Write an event."""
        line = json.dumps({"event": event, "time": timestamp(), **fields}, ensure_ascii=False)
        self._stream.write(f"{line}\n")
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

    def failed(self, text: str, traceback: str) -> None:
        """Trajectories failed."""
        self.emit("failure", text=text, traceback=traceback)

    def say(self, text: str) -> None:
        """Something happened."""
        self.emit("message", text=text)


def timestamp() -> str:
    """The local time with its offset: ``2026-11-22 15:04:05+01:00``."""
    return datetime.now().astimezone().isoformat(" ", "seconds")


def evaluation_line(step: int, result: "Evaluation") -> str:
    """An evaluation in words; what it was sampled from is in ``evaluations/``."""
    return (
        f"after {counted(step, 'step')}, {result.name}: success {result.success:.3f} "
        f"[{result.success_low:.3f}, {result.success_high:.3f}], "
        f"context {result.metrics['context_tokens']:.1f} tokens, {result.seconds:.3g} s"
    )
