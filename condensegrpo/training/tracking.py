"""What a run logs: metrics and report at once, and everything to its trackers in the background."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from condensegrpo.assembly.runtime import open_trackers
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.credentials import without_credentials
from condensegrpo.core.errors import RunError
from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.tracker import RunStart, StartedRun, Table
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.episodes.toolcalls import shortened
from condensegrpo.episodes.toolformats import transcript
from condensegrpo.evaluation.figures import evaluation_metrics
from condensegrpo.reporting.run_report import ReportTracker
from condensegrpo.storage.files import read_object, write_atomically
from condensegrpo.storage.run_folder import JsonlTracker, RunFolder
from condensegrpo.storage.trajectories import sample_trajectories
from condensegrpo.trackers.background import BackgroundTracker

CLOSE_SECONDS = 60.0  # that the end of a run waits for its trackers
TRAJECTORIES = 16  # of an evaluation, in a table
CHARACTERS = 4000  # of a cell
COLUMNS = (
    *("trajectory", "question", "ground truth", "answer", "correct", "reward", "stop", "turns", "largest context"),
    *("contexts", "condensed spans"),
)


class RunTracking:
    """The metrics file, the report and the trackers of a run, on its first rank."""

    def __init__(self, config: RunConfig, folder: RunFolder, observer: Observer) -> None:
        """Build the trackers; ``start`` opens their runs."""
        self._config, self._folder, self._observer = config, folder, observer
        self._metrics, self._report = JsonlTracker(folder.metrics), ReportTracker(folder)
        names = [plugin.name for plugin in config.trackers]
        self._trackers = {
            name if name not in names[:number] else f"{name}#{number}": BackgroundTracker(name, tracker)
            for number, (name, tracker) in enumerate(zip(names, open_trackers(config), strict=True))
        }
        self._identities: dict[str, str] = {}  # of the runs of the trackers
        self._lock = threading.Lock()

    def start(self, done: int) -> None:
        """Open the runs of the trackers, after ``done`` steps: those that are known continue."""
        self._identities = read_object(self._folder.trackers, str)
        config = {key: without_credentials(value) for key, value in self._config.model_dump(mode="json").items()}
        folder, known = self._folder.path, dict(self._identities)
        last = self._folder.last_step
        for key, tracker in self._trackers.items():
            run = RunStart(
                name=folder.name,
                folder=folder,
                config=config,
                step=done,
                recorded=-1 if last is None else last,
                identity=known.get(key),
            )
            tracker.start(run, partial(self._remember, key))

    def _remember(self, key: str, started: StartedRun) -> None:
        """Keep the identity of a tracker's run; called in the thread of the tracker."""
        with self._lock:
            self._identities[key] = started.identity
            write_atomically(self._folder.trackers, json.dumps(self._identities, indent=2) + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics."""
        self._metrics.log(step, metrics)
        self._report.log(step, metrics)
        for tracker in self._trackers.values():
            tracker.log(step, metrics)
        self._say_messages()

    def evaluated(self, step: int, results: Sequence[Evaluation]) -> None:
        """Record evaluations: their metrics, and a sample of their trajectories."""
        self.log(step, {key: value for result in results for key, value in evaluation_metrics(result).items()})
        for tracker in self._trackers.values():
            for result in results:
                file = self._folder.evaluation(step, result.name)
                tracker.log_table(step, f"trajectories/{result.name}", partial(trajectory_table, file))

    def close(self) -> None:
        """Write the report, close the trackers, and wait for them for a limited time."""
        try:
            self._report.flush()
        except RunError as error:  # perhaps that of the run, which is raised already
            self._observer.notice(str(error))
        if self._trackers:
            self._observer.phase("closing the trackers", None)
        for tracker in self._trackers.values():
            tracker.end()
        deadline = time.monotonic() + CLOSE_SECONDS
        losses = [tracker.wait(deadline - time.monotonic()) for tracker in self._trackers.values()]
        self._say_messages()
        for loss in filter(None, losses):
            self._observer.notice(loss)

    def _say_messages(self) -> None:
        for tracker in self._trackers.values():
            for message in tracker.messages():
                self._observer.notice(message)


def trajectory_table(file: Path) -> Table:
    """A sample of the trajectories of a file."""
    return Table(columns=COLUMNS, rows=tuple(map(_row, sample_trajectories(file, TRAJECTORIES))))


def _row(scored: ScoredTrajectory) -> tuple[str | int | float | None, ...]:
    trajectory, figures = scored.trajectory, scored.figures
    contexts, condensed = [], []  # what every turn saw, with its reply; a line for each condensation
    for number, turn in enumerate(trajectory.turns):
        messages = "\n".join(f"{message.role}: {transcript(message)}" for message in (*turn.context, turn.reply))
        contexts.append(f"turn {number} ({len(turn.prompt_ids)} tokens)\n{messages}")
        if declared := turn.condensation:  # turn 2, last_k: 55 → 31 tokens; turns 0–1 dropped (24 tokens)
            spans = "; ".join(
                f"turns {span.first}–{span.last} {span.status} ({span.tokens} tokens)" for span in declared.spans
            )
            tokens = f"{declared.tokens_before} → {declared.tokens_after} tokens"
            condensed.append(f"turn {number}, {declared.condenser}: {tokens}; {spans}")
    return (
        figures.id,
        trajectory.question,
        trajectory.ground_truth,
        trajectory.answer,
        figures.correct,
        figures.total,
        figures.stop.value,
        figures.turns,
        figures.context_tokens,
        shortened("\n\n".join(contexts), CHARACTERS),
        shortened("\n".join(condensed), CHARACTERS),
    )
