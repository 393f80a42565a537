"""Runs the arms and seeds of a study as ordinary ``condensegrpo train`` processes, continuing until all are done.

What a run has reached is read from its folder alone, so a sweep continues whatever ended it: finished runs are
skipped, others resume from their newest checkpoint. Arms that differ in GRPO only share the warm start of a seed.
"""

import math
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean, stdev
from typing import Protocol

from condensegrpo.config.load import load_config
from condensegrpo.config.resumed import change_table, changes_between, store_configuration
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.study import Study, run_name, same_warm_start
from condensegrpo.core.errors import ConfigError
from condensegrpo.evaluation.figures import evaluations_in
from condensegrpo.metrics.intervals import Interval
from condensegrpo.storage.files import TEMPORARY
from condensegrpo.storage.new_run import check_run_name
from condensegrpo.storage.run_folder import RunFolder, read_metrics


class RunState(StrEnum):
    """How far a run of a study is."""

    WAITING = "waiting"  # not started
    STOPPED = "stopped"  # started, not finished, no process of this sweep works on it
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"  # its process ended with an error in this sweep
    KILLED = "killed"  # likewise by signal 9, as the kernel does where memory is short


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """One run of a study."""

    arm: str
    seed: int
    config: RunConfig
    arguments: tuple[str, ...]  # of ``condensegrpo train``, for its first start

    @property
    def name(self) -> str:
        """Of its folder."""
        return run_name(self.arm, self.seed)

    @property
    def folder(self) -> RunFolder:
        """Where it is written, or will be."""
        return RunFolder(Path(self.config.runs_dir) / self.config.name)

    @property
    def finished(self) -> bool:
        """Whether its last evaluation is recorded, and its last checkpoint there."""
        steps = self.config.train.steps
        saved = (self.folder.checkpoints / f"step_{steps:06d}").is_dir()
        return saved and any(line["step"] == steps for line in self.evaluated)

    @property
    def evaluated(self) -> tuple[dict[str, float], ...]:
        """The metrics of its evaluations so far."""
        return tuple(line for line in read_metrics(self.folder.metrics) if "eval/success" in line)

    @property
    def step(self) -> int:
        """Optimiser steps that it logged."""
        return self.folder.last_step or 0

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments of the command line that starts it, or continues it."""
        started = self.folder.config.is_file()
        return ("train", "--resume", str(self.folder.path)) if started else ("train", *self.arguments)


class RunProcess(Protocol):
    """A running process, as of ``subprocess.Popen``."""

    def poll(self) -> int | None:
        """Its exit code; None: it runs."""

    def send_signal(self, number: int, /) -> None:
        """Send it a signal."""


Launch = Callable[[StudyRun], RunProcess]


def runs_of(study: Study, out: Path) -> tuple[StudyRun, ...]:
    """All runs of a study: the first seed of every arm first, so that an unfinished sweep compares all arms."""
    runs = tuple(
        StudyRun(
            arm=arm,
            seed=seed,
            config=study.config_of(arm, seed, out),
            arguments=study.run_arguments(arm, seed, out),
        )
        for seed in study.seeds
        for arm in study.arms
    )
    for run in runs:
        if not run.folder.config.is_file():
            check_run_name(run.folder.path, overwrite=False)
            continue
        before = load_config(run.folder.config)
        # a folder can be moved
        if changes := [each for each in changes_between(before, run.config) if each.key != "runs_dir"]:
            raise ConfigError(
                f"continuing the study {study.name}: {run.folder.path} was started with another configuration:\n"
                f"{change_table(changes)}\nUndo the change, remove that folder, or give --out another folder."
            )
    return runs


def check_runs(runs: Iterable[StudyRun]) -> None:
    """Check every run as ``train`` does, before any of them starts."""
    from condensegrpo.assembly.build import build  # imports torch
    from condensegrpo.assembly.preflight import check_run

    for run in runs:
        try:
            check_run(build(run.config), resumed=run.folder.config.is_file())
        except ConfigError as error:
            raise type(error)(f"the run {run.name}: {error}") from error


class Sweep:
    """The processes of a study. ``advance`` starts and reaps them; nothing else does."""

    def __init__(self, runs: Sequence[StudyRun], *, parallel: int, launch: Launch) -> None:
        self.runs, self._parallel, self._launch = tuple(runs), parallel, launch
        self.states = {run.name: _state(run) for run in runs}
        self._waiting = [run for run in runs if self.states[run.name] is not RunState.FINISHED]
        self._active: dict[str, tuple[StudyRun, RunProcess]] = {}
        self._stopping = False

    @property
    def active(self) -> tuple[StudyRun, ...]:
        """The runs that have a process."""
        return tuple(run for run, _ in self._active.values())

    def advance(self) -> bool:
        """Reap the processes that ended and start others; False: nothing is left to do."""
        for name, (run, process) in tuple(self._active.items()):
            if (code := process.poll()) is not None:
                del self._active[name]
                failed = code != 0 and not self._stopping and not run.finished
                error = RunState.KILLED if code == -signal.SIGKILL else RunState.FAILED
                self.states[name] = error if failed else _state(run)
        while len(self._active) < self._parallel:
            warming = [run.config for run in self.active if not is_warm(run.folder)]
            # an active run may be making the warm start of a waiting one
            ready = (run for run in self._waiting if not any(same_warm_start(run.config, each) for each in warming))
            if (waiting := next(ready, None)) is None:
                break
            self._start(waiting)
        return bool(self._active)

    def _start(self, run: StudyRun) -> None:
        self._waiting.remove(run)
        if not run.folder.config.is_file():  # of a start that was killed before it had one, folders may be left
            for left in (run.folder.path, *run.folder.path.parent.glob(f"{run.folder.path.name}{TEMPORARY}*")):
                shutil.rmtree(left, ignore_errors=True)
            adopt_warm_start(run.folder, run.config, ((other.folder, other.config) for other in self.runs))
        self._active[run.name] = (run, self._launch(run))
        self.states[run.name] = RunState.RUNNING

    @property
    def steps_taken(self) -> int:
        """Optimiser steps of all runs so far."""
        return sum(run.step for run in self.runs)

    @property
    def steps_left(self) -> int:
        """Optimiser steps of the runs that wait or run."""
        ended = (RunState.FINISHED, RunState.FAILED, RunState.KILLED)
        return sum(run.config.train.steps - run.step for run in self.runs if self.states[run.name] not in ended)

    def start_no_more(self) -> None:
        """Leave what is waiting for the next sweep."""
        self._waiting.clear()

    def stop(self, number: int) -> None:
        """Start no further run, and send a signal to those that run."""
        self._stopping = True
        self.start_no_more()
        for _, process in self._active.values():
            process.send_signal(number)


def results_table(runs: Sequence[StudyRun]) -> str:
    """Success and context of finished runs after training, by arm and evaluation, as a table in Markdown.

    Intervals are t intervals over seeds, 95 %; a single seed has none.
    """
    lines = ["| arm | evaluation | seeds | success [95 %] | largest context, tokens [95 %] |", "|---|---|---|---|---|"]
    for arm in dict.fromkeys(run.arm for run in runs):
        last = [run.evaluated[-1] for run in runs if run.arm == arm]
        for name, prefix in evaluations_in(last[0]).items():
            success = _over_seeds([line[f"{prefix}/success"] for line in last], ".3f", low=0.0, high=1.0)
            context = _over_seeds([line[f"{prefix}/context_tokens"] for line in last], ".1f", low=0.0)
            lines.append(f"| {arm} | {name} | {len(last)} | {success} | {context} |")
    return "\n".join(lines)


def _over_seeds(values: Sequence[float], form: str, *, low: float, high: float = math.inf) -> str:
    """The mean of one number for each seed, with its interval inside the possible values."""
    if len(values) == 1:
        return format(values[0], form)
    from scipy.special import stdtrit

    mean, reach = fmean(values), float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / len(values) ** 0.5
    return format(Interval(mean, max(mean - reach, low), min(mean + reach, high)), form)


def _state(run: StudyRun) -> RunState:
    if run.finished:
        return RunState.FINISHED
    return RunState.STOPPED if run.folder.config.is_file() else RunState.WAITING


def is_warm(folder: RunFolder) -> bool:
    """Whether the warm start of a run is complete."""
    return (folder.path / "origin" / "warm").is_dir()


def adopt_warm_start(folder: RunFolder, config: RunConfig, others: Iterable[tuple[RunFolder, RunConfig]]) -> bool:
    """Make the folder of a run that was not started, with the complete warm start of one of the others.

    The folder is then as if the run had been stopped after its warm start: it is continued with ``train --resume``.

    Returns:
        Whether one of the others has it; if not, nothing was written.
    """
    origins = (other.path / "origin" for other, its in others if is_warm(other) and same_warm_start(config, its))
    origin = next(origins, None)
    if origin is None:
        return False
    from condensegrpo.learner.atomic_folder import published_folder  # imports torch

    with published_folder(folder.path) as aside:
        made = RunFolder.create(aside)
        # without the progress that the other run may still be removing
        shutil.copytree(origin, aside / "origin", ignore=shutil.ignore_patterns(".*"))
        store_configuration(made, config, first_step=0)
    return True
