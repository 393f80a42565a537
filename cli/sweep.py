"""``condensegrpo sweep``: runs the arms and seeds of a study, and writes its results."""

import os
import shlex
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from condensegrpo.assembly.policy import writer_folder
from condensegrpo.cli.process import SWEEP, StopRequest, outlived_streams
from condensegrpo.config.study import Study, find_study, load_study
from condensegrpo.core.wording import plural
from condensegrpo.display import theme
from condensegrpo.display.console import waiting_for
from condensegrpo.learner.launchers import check_alone
from condensegrpo.storage.environment import edited_inputs, sha256_of
from condensegrpo.storage.files import make_folder, write_atomically
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.training.sweep import (
    Launch,
    RunProcess,
    RunState,
    StudyRun,
    Sweep,
    check_runs,
    results_table,
    runs_of,
)

POLL_SECONDS = 0.5
STATUS_SECONDS = 60.0  # between two status lines where there is no terminal
SUMMARY = "summary.md"  # the table of the finished runs
TAIL = 3  # lines of the log of a failed run that are shown
KILLED = (
    "was killed by signal 9, as the kernel does where memory is short: lower --parallel or "
    "learner.tokens_per_micro_batch, or set learner.checkpoint_activations=on"
)


def sweep(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study file (YAML), or the name of a shipped study.")],
    parallel: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of runs and results; by default runs/ and the name of the study.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, list the runs and how long they will take, run none.")
    ] = False,
) -> None:
    """Run a study, arms × seeds of ordinary runs, and write a table of its results; call it again to continue.

    Example: condensegrpo sweep studies/s1_summaries.yaml --parallel 2
    """
    check_alone(os.environ)
    found: Study = load_study(find_study(study))
    run_sweep(found, out, parallel=parallel, dry_run=dry_run, launch=start_process)
    if dry_run and found.predictions:
        typer.echo(f"power: python -m condensegrpo.studies.lab check {shlex.quote(study)}")


def run_sweep(study: Study, out: Path | None, *, parallel: int, launch: Launch, dry_run: bool = False) -> None:
    """Run a study; a test gives another ``launch``."""
    stop = StopRequest()
    folder = out or Path("runs") / study.name
    runs = runs_of(study, folder)
    planned = Sweep(runs, parallel=parallel, launch=launch)
    title = "checking the configurations and that no held-out problem is trained on"
    if not sys.stderr.isatty():
        theme.console(sys.stderr).print(f"{title} …")
    with waiting_for(title) as display:
        unchecked = [run for run in runs if planned.states[run.name] is not RunState.FINISHED]
        display.phase(title, len(unchecked))
        check_runs(display.counted(unchecked))
        hash_of = cache(sha256_of)  # the runs have their writers in common
        folders = {run.name: run.folder.path for run in runs}
        edited = {name: files for name, run in folders.items() if (files := edited_inputs(run, writer_folder, hash_of))}
    for file in sorted({file for files in edited.values() for file in files}):
        names = ", ".join(name for name, files in edited.items() if file in files)
        theme.console(sys.stderr).print(
            f"{file} was edited since these runs were started: {names}. Remove their folders to run them again."
        )
    if dry_run:
        typer.echo(plan_text(planned))
        return
    make_folder(folder)
    with RunFolder(folder).locked(), outlived_streams(lambda why: None):  # its runs have logs, and results are files
        console = theme.console(sys.stderr)
        unfinished = _run(planned, study, stop, console)
        _finish(planned, folder, console, unfinished=unfinished)


def start_process(run: StudyRun) -> RunProcess:
    """A run in a process and process group of its own, so that only the sweep hears Ctrl-C; it ends with the sweep."""
    logs = run.folder.path.parent / "logs"
    logs.mkdir(exist_ok=True)
    with (logs / f"{run.name}.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "condensegrpo", *run.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, SWEEP: str(os.getpid())},
            process_group=0,
        )


def plan_text(sweep: Sweep) -> str:
    """A line for each run: its state and its command; then how much there is to do."""
    lines = [
        f"{run.name:24} {sweep.states[run.name]:9} {theme.program()} {shlex.join(run.command)}" for run in sweep.runs
    ]
    return "\n".join([*lines, f"{plural(len(sweep.runs), 'run')}; {plural(sweep.steps_left, 'step')} left"])


class SweepProgress:
    """Shows the runs of a sweep: a live table on a terminal, else a line when one starts or ends, and every minute."""

    def __init__(self, sweep: Sweep, live: Live) -> None:
        self._sweep, self._live, self._console = sweep, live, live.console
        self._states = dict(sweep.states)
        self._began, self._steps = time.monotonic(), sweep.steps_taken
        self._next_status = time.monotonic() + STATUS_SECONDS

    def update(self) -> None:
        """Show what changed."""
        changed = [run for run in self._sweep.runs if self._states[run.name] != self._sweep.states[run.name]]
        self._states = dict(self._sweep.states)
        for run in changed:
            self._console.print(f"{run.name}: {self._states[run.name]}. {self._summary()}")
        self._live.update(self._table(), refresh=True)  # draws nothing where there is no terminal
        if not self._console.is_terminal and time.monotonic() > self._next_status:
            self._next_status = time.monotonic() + STATUS_SECONDS
            steps = (f"{run.name} step {run.step}/{run.config.train.steps}" for run in self._sweep.active)
            self._console.print(f"{', '.join(steps)}. {self._summary()}")

    def _summary(self) -> str:
        finished = sum(state is RunState.FINISHED for state in self._states.values())
        text, left = f"{finished} of {plural(len(self._states), 'run')} finished", self._sweep.steps_left
        taken = self._sweep.steps_taken - self._steps
        if not (taken and left):
            return text
        seconds = (time.monotonic() - self._began) * left / taken
        return f"{text}; about {timedelta(seconds=round(seconds))} left"

    def _table(self) -> Table:
        table = Table(box=None, caption=self._summary(), caption_justify="left")
        for heading in ("arm", "seed", "step", "held-out success"):
            table.add_column(heading)
        for run in self._sweep.active:
            success = " → ".join(f"{line['eval/success']:.3f}" for line in run.evaluated[-4:])
            table.add_row(Text(run.arm), str(run.seed), f"{run.step}/{run.config.train.steps}", success)
        return table


def _run(sweep: Sweep, study: Study, stop: StopRequest, console: Console) -> int:
    """Run until nothing is left to do; returns the exit code of a sweep that did not finish every run."""
    began, stopping = time.monotonic(), False
    with Live(console=console, auto_refresh=False, transient=True) as live:
        progress = SweepProgress(sweep, live)
        while sweep.advance():
            progress.update()
            if stop.requested() and not stopping:
                stopping = True
                sweep.stop(signal.SIGINT)
            if study.hours is not None and time.monotonic() - began > study.hours * 3600:
                sweep.start_no_more()
            time.sleep(POLL_SECONDS)
        progress.update()
    return stop.exit_code if stopping else 1


def _finish(sweep: Sweep, folder: Path, console: Console, *, unfinished: int) -> None:
    """Write the results of the finished runs, name the failed ones, and say how to continue.

    Args:
        unfinished: the exit code if a run is not finished.
    """
    finished = [run for run in sweep.runs if sweep.states[run.name] is RunState.FINISHED]
    if finished:
        table = results_table(finished)
        typer.echo(table)
        write_atomically(folder / SUMMARY, f"{table}\n")
        console.print(f"folder {folder}: {SUMMARY}", soft_wrap=True)
    errors = {RunState.FAILED: "failed", RunState.KILLED: KILLED}
    for run in sweep.runs:
        if error := errors.get(sweep.states[run.name]):
            log = folder / "logs" / f"{run.name}.txt"
            tail = log.read_text(errors="replace").splitlines()[-TAIL:] if log.is_file() else []
            console.print("\n  ".join([f"{run.name} {error}; see {log}:", *tail]), soft_wrap=True)
    if missing := len(sweep.runs) - len(finished):
        console.print(f"{plural(missing, 'run')} not finished. To continue, run the same command again.")
        raise typer.Exit(unfinished)
