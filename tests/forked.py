"""Runs the command line in forks of a process that has imported torch, DeepSpeed and transformers already.

A start of Python with these imports takes six seconds of CPU time, and the tests start the command more than a hundred
times. A fork has a pid, arguments, environment, working folder, streams, signals and exit code as a fresh process has.
"""

import atexit
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

from condensegrpo.cli.app import main


class ForkedCommand:
    """A running command, with the interface of ``subprocess.Popen`` that the tests use.

    ``more`` are variables that the command has besides ``environment``, in which the libraries were imported;
    ``program`` is called with ``sys.argv`` set.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        more: Mapping[str, str] = {},
        program: Callable[[], object] = main,
    ) -> None:
        self.args = ["condensegrpo", *arguments]
        self._output = Path(tempfile.mkdtemp(prefix="command-"))
        weakref.finalize(self, shutil.rmtree, self._output, ignore_errors=True)
        streams = [str(self._output / name) for name in ("stdout", "stderr")]
        self._process = command_server(tuple(sorted(environment.items()))).Process(
            target=_child, args=(program, self.args, str(cwd), {**environment, **more}, streams)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def errors(self) -> str:
        """What was written to standard error so far."""
        return (self._output / "stderr").read_text(encoding="utf-8")

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; what was written to standard output and standard error."""
        self.wait(timeout)
        out, err = ((self._output / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        return out, err


def forked_ranks(
    arguments: Sequence[str], *, cwd: Path, environment: Mapping[str, str], program: Callable[[], object] = main
) -> list[ForkedCommand]:
    """Two running ranks of one machine, with the variables that ``torchrun`` sets; what one prints is its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [
        ForkedCommand(
            arguments,
            cwd=cwd,
            environment=environment,
            more={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            program=program,
        )
        for rank in range(2)
    ]


@cache
def command_server(environment: tuple[tuple[str, str], ...]) -> ForkServerContext:
    """The process to fork, started with this environment: libraries read theirs when they are imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # of preloaded.py
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _child(
    program: Callable[[], object],
    arguments: Sequence[str],
    cwd: str,
    environment: Mapping[str, str],
    streams: Sequence[str],
) -> None:
    """Run the program, and end as the interpreter ends: threads, then what was registered with atexit."""
    for descriptor, file in enumerate(streams, start=1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(arguments)
    try:
        program()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
