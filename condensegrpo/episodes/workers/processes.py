"""Workers as processes of this machine, forked from one process that has imported what they need.

An import of the components takes two to five seconds of CPU time, a fork some milliseconds. Forks of the fork server of
``multiprocessing`` import the main module of the rank: a script without ``if __name__ == "__main__"`` would run again.
This one is a fresh interpreter with a single thread, in a session of its own: Ctrl-C in a terminal reaches the rank
alone. When the rank ends, the server ends the whole session, what tools started there included.
"""

import asyncio
import atexit
import gc
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pkgutil import resolve_name
from threading import Lock

from condensegrpo.episodes.workers.worker import OpenPlayer, Worker

PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import fork_workers; fork_workers({control}, {opener!r})"
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # the rank has the cores
CLOSE_SECONDS = 2.0  # that workers have to end by themselves
END_SECONDS = 5.0  # that the server may need to end, beside these
LENGTH_BYTES = 8  # before each message
REMEDY = "Lower rollout.workers.processes, or set it to 0"


class _ProcessHandle:
    """A ``WorkerHandle`` of a process."""

    def __init__(self, connection: socket.socket, end: Callable[[], str]) -> None:
        self._connection, self.end = connection, end
        self._outbox: _Outbox | None = None

    async def messages(self, play: bytes) -> AsyncGenerator[bytes, None]:
        reader, writer = await asyncio.open_connection(sock=self._connection.dup())  # of this event loop
        self._outbox = _Outbox(writer)
        try:
            self.send(play)
            while True:
                yield await _read(reader)
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            writer.close()

    def send(self, data: bytes) -> None:
        if self._outbox is not None:
            self._outbox.send(data)

    def is_idle(self) -> bool:
        return not wait([self._connection], timeout=0)  # a worker says nothing between plays: its end can be read


class _Outbox:
    """Messages to the other side: eight bytes of length each, and its pickle.

    Those of one round of the event loop are one system call, which costs as much as the rest of a message.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._waiting = writer, list[bytes]()

    def send(self, data: bytes) -> None:
        self._waiting += (len(data).to_bytes(LENGTH_BYTES), data)
        asyncio.get_running_loop().call_soon(self._write)  # always: an abandoned plug-in may send at the same time

    def _write(self) -> None:
        if self._waiting and not self._writer.is_closing():  # closing: the other side has ended
            self._writer.writelines(self._waiting)
        self._waiting.clear()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """The next message."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES)))


class ProcessHost:
    """Starts workers as processes of this machine."""

    def __init__(self, opener: str) -> None:
        """``opener``: a function as ``module:name``, called in each worker; returns what opens players there."""
        self._opener = opener
        self._server: _ForkServer | None = None

    def start(self, number: int) -> Sequence[_ProcessHandle]:
        """Start some workers. Returns before they are up."""
        if self._server is None or self._server.process.poll() is not None:
            self.close()
            self._server = _ForkServer(self._opener)
        return [self._server.fork() for _ in range(number)]

    def close(self) -> None:
        """End all workers. May be called twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


class _ForkServer:
    """The process that workers are forked from, as the rank sees it."""

    def __init__(self, opener: str) -> None:
        self._control, theirs = Pipe()
        self._ends: list[socket.socket] = []  # of the connections to the workers
        self._asking = Lock()  # of threads: one request and its answer at a time
        with theirs:
            program = PROGRAM.format(path=sys.path, module=__name__, control=theirs.fileno(), opener=opener)
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                env={**os.environ, **THREADS},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def fork(self) -> _ProcessHandle:
        number = len(self._ends)
        end, theirs = socket.socketpair()
        with theirs, self._asking:
            self._control.send(number)
            send_handle(self._control, theirs.fileno(), self.process.pid)
        self._ends.append(end)
        return _ProcessHandle(end, partial(self._end, number))

    def close(self) -> None:
        self._control.close()
        for end in self._ends:
            end.close()
        try:
            self.process.wait(CLOSE_SECONDS + END_SECONDS)
        except subprocess.TimeoutExpired:  # it still imports
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _end(self, number: int) -> str:
        """End a worker, unless it has ended. Returns how it ended. It waits for the server, perhaps for its imports."""
        self._ends[number].close()
        try:
            with self._asking:
                self._control.send(number)
                return described(*self._control.recv())
        except (EOFError, OSError):
            return f"ended together with all workers of this rank: their parent process was killed. {REMEDY}."


def described(process: int, code: int) -> str:
    """How a worker ended, by the exit code of ``multiprocessing``.

    -9  ─▶  process 4711 was killed by signal 9 (Killed), …
    3   ─▶  process 4711 ended itself with exit code 3, …
    """
    lost = "its unfinished trajectories are lost"
    if code < 0:
        why = "the kernel does when memory runs out" if code == -signal.SIGKILL else "a fault in C code does"
        killed = f"process {process} was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"{killed}, as {why}; {lost}. {REMEDY}"
    return (
        f"process {process} ended itself with exit code {code}, as os._exit() in a thread that a plug-in started does; "
        f"{lost}. Raise an exception there instead"
    )


def fork_workers(control: int, opener: str) -> None:
    """The program of the fork server: ends when the rank closes its end of ``control``, the descriptor of a connection.

    The number of a new worker, with the worker's end of its connection, asks for a fork; a known number for its end.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # SLURM sends it to all processes: the rank decides when to end
        signal.signal(number, lambda *_: None)
    open_players = resolve_name(opener)
    gc.freeze()  # a collection in a worker would copy the pages that it shares with the others
    requests, workers = Connection(control), list[BaseProcess]()
    try:
        with suppress(EOFError, ConnectionError):  # the rank has ended, perhaps before it read the last answer
            while True:
                number = requests.recv()
                if number < len(workers):
                    workers[number].kill()
                    workers[number].join()
                    requests.send((workers[number].pid, workers[number].exitcode))
                    continue
                with socket.socket(fileno=recv_handle(requests)) as end:
                    workers.append(get_context("fork").Process(target=_work, args=(requests, end, open_players)))
                    workers[number].start()
        deadline = time.monotonic() + CLOSE_SECONDS
        for worker in workers:
            worker.join(max(deadline - time.monotonic(), 0.0))
    except Exception:
        traceback.print_exc()  # here: what follows leaves no time for it
    finally:  # also after an error: no worker may outlive the rank
        os.killpg(0, signal.SIGKILL)


def _work(requests: Connection, end: socket.socket, open_players: Callable[[], OpenPlayer]) -> None:
    """What a worker does until the rank closes its end of the connection."""
    requests.close()
    asyncio.run(_serve(end, open_players()))
    atexit._run_exitfuncs()


async def _serve(end: socket.socket, open_player: OpenPlayer) -> None:
    reader, writer = await asyncio.open_connection(sock=end)
    worker = Worker(open_player, _Outbox(writer).send)
    with suppress(asyncio.IncompleteReadError, OSError):
        while True:
            worker.receive(await _read(reader))
