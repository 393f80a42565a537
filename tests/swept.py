"""Runs `condensegrpo sweep` in a process whose runs are forks of it: the libraries are imported once for all."""

import multiprocessing
import os
from multiprocessing.process import BaseProcess
from pathlib import Path

from command import ENVIRONMENT, ROOT
from forked import _child, command_server, main
from typer import Exit

from condensegrpo.cli.process import SWEEP
from condensegrpo.cli.sweep import run_sweep
from condensegrpo.config.study import load_study
from condensegrpo.training.sweep import RunProcess, StudyRun


class ForkedRun:
    """A run of a sweep, as ``subprocess.Popen``."""

    def __init__(self, run: StudyRun) -> None:
        streams = [f"{run.folder.path.parent}/{run.name}.{number}" for number in (1, 2)]
        environment = {**ENVIRONMENT, SWEEP: str(os.getpid())}
        arguments = (main, ["condensegrpo", *run.command], str(ROOT), environment, streams)
        self._process = multiprocessing.get_context("fork").Process(target=_child, args=arguments)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def start_sweep(study: Path, out: Path, *, parallel: int) -> BaseProcess:
    """A running sweep; its exit code is that of the command."""
    process = command_server(tuple(sorted(ENVIRONMENT.items()))).Process(target=_sweep, args=(study, out, parallel))
    process.start()
    return process


def _sweep(study: Path, out: Path, parallel: int) -> None:
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    printed = os.open(f"{out}.printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # not among pytest's own lines
    os.dup2(printed, 1), os.dup2(printed, 2)

    def launch(run: StudyRun) -> RunProcess:
        return ForkedRun(run)

    try:
        run_sweep(load_study(study), out, parallel=parallel, launch=launch)
    except Exit as end:
        raise SystemExit(end.exit_code) from end
