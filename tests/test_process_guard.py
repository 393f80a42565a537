"""The processes of a server end together. The server here is a stand-in, with a child that ignores SIGTERM."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from condensegrpo.core import process_guard

PROGRAM = """
import os, signal, sys, time
from condensegrpo.core import process_guard

def serve():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.fork()
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)

process_guard.STOP_SECONDS = 1
process_guard.run_supervised(serve, watched=sys.argv[1], left=sys.argv[2])
"""

Guard = subprocess.Popen[str]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(lambda guard, server, child: os.kill(server, signal.SIGKILL), 137, id="its server is killed"),
        pytest.param(lambda guard, server, child: guard.kill(), -9, id="its guard is killed"),
        pytest.param(lambda guard, server, child: guard.terminate(), 137, id="it ignores SIGTERM"),
        pytest.param(lambda guard, server, child: guard.stdin.close(), 137, id="its run is killed"),
    ],
)
def test_no_process_of_a_server_outlives_the_others(
    end: Callable[[Guard, int, int], None], code: int, tmp_path: Path
) -> None:
    weights, sockets = tmp_path / "weights", tmp_path / "sockets"
    weights.mkdir()
    sockets.mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(weights), str(sockets)], text=True, **pipes) as guard:
        assert guard.stdin is not None
        assert guard.stdout is not None
        server, child = sorted(int(guard.stdout.readline()) for _ in range(2))
        assert os.getpgid(server) == os.getpgid(child) == server
        end(guard, server, child)
        assert guard.wait(60) == code
        assert guard.stdout.read() == ""  # at its end: the last process that could write to it has ended
        assert weights.exists() != guard.stdin.closed
        assert sockets.exists() == (code == -signal.SIGKILL)  # of the guard itself


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(lambda guard: guard.terminate(), 128 + signal.SIGTERM, id="it is asked to end"),
        pytest.param(lambda guard: guard.stdin.close(), 128 + signal.SIGKILL, id="its run is killed"),
    ],
)
def test_a_command_is_guarded_too(end: Callable[[Guard], None], code: int) -> None:
    command = [sys.executable, "-P", process_guard.__file__, "sh", "-c", "echo here; sleep 600 & wait"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as guard:
        assert guard.stderr is not None
        assert guard.stderr.readline() == "here\n"
        end(guard)
        assert guard.wait(60) == code
        assert guard.stderr.read() == ""  # at its end: the child of the command has ended
