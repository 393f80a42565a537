"""Ends all processes of a server together, whichever of them ends first. Standard library only.

    run ── standard input ─▶ guard ── pipe ─▶ server ─▶ engine ─▶ workers        the last three are one process group

An engine of vLLM survives the kill of its server: it ignores SIGTERM, keeps its memory, and the port that it inherited
accepts connections and never answers.

    python process_guard.py COMMAND ARGUMENT …      any server, which writes to stderr only, until standard input closes
"""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

STOP_SECONDS = 15  # between SIGTERM and SIGKILL


def run_supervised(serve: Callable[[], None], *, watched: str | None = None, left: str | None = None) -> NoReturn:
    """Run a server in a process of its own, and end its process group when it, this process or the run ends.

    SIGINT and SIGTERM are passed to the server, which has ``STOP_SECONDS`` to end. Call it before threads are started:
    it forks. It exits with the server's code.

    Args:
        serve: serves until a signal ends it.
        watched: a folder that is removed when standard input closes, which also ends the server: the run that started
            it holds the other end of that pipe, so that a killed run leaves neither processes nor weights in memory
            behind. None: standard input is not read; empty: there is no such folder.
        left: a folder that is removed once all have ended.
    """
    read_end, write_end = os.pipe()
    passed = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed)  # until this process passes them on
    server = os.fork()
    if server == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
        os.setpgid(0, 0)
        os.close(write_end)
        _when_closed(read_end, lambda: os.killpg(0, signal.SIGKILL))
        serve()
        sys.exit()
    with suppress(OSError):  # the server did it before
        os.setpgid(server, server)
    os.close(read_end)

    def end_group() -> None:
        with suppress(ProcessLookupError):
            os.killpg(server, signal.SIGKILL)

    def pass_on(number: int, _: FrameType | None) -> None:
        os.kill(server, number)
        signal.alarm(STOP_SECONDS)

    def end_with_run() -> None:
        shutil.rmtree(str(watched), ignore_errors=True)  # another server of the run may be removing it too
        end_group()

    signal.signal(signal.SIGALRM, lambda *_: end_group())
    for number in passed:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
    if watched is not None:
        _when_closed(sys.stdin.fileno(), end_with_run)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # its number stays taken until ``waitpid``
    end_group()
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    if left is not None:
        shutil.rmtree(left, ignore_errors=True)
    os._exit(code if code >= 0 else 128 - code)  # the thread that reads standard input does not delay the end


def _when_closed(pipe: int, call: Callable[[], None]) -> None:
    """Make a call, in a thread, when the other end of a pipe closes."""

    def wait() -> None:
        while os.read(pipe, 4096):
            pass
        call()

    threading.Thread(target=wait, daemon=True).start()


def _become_command() -> None:
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")


if __name__ == "__main__":
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    run_supervised(_become_command, watched="")
