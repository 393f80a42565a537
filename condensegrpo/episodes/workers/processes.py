"""Workers as processes of this machine, forked from one process that has imported what they need.

An import of the components takes two to five seconds of CPU time, a fork some milliseconds. The process that is forked
is a fresh interpreter with a single thread, in a session of its own: Ctrl-C in a terminal reaches the rank alone. When
the rank ends, it ends the whole session, what tools started there included.
"""

import atexit
import gc
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

from condensegrpo.episodes.workers.worker import StartedWorker

STATUS = struct.Struct("ii")  # process id and wait status of a worker
NUMBER = struct.Struct("i")
PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import main; main({control})"
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # the rank has the cores
END_SECONDS = 5.0
REMEDY = "Lower rollout.workers.processes, or set it to 0"


class ProcessHost:
    """Starts workers by a program whose ``main`` calls ``fork_workers``."""

    def __init__(self, module: str) -> None:
        """``module``: of the program."""
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._workers = 0  # of the process

    def start(self, number: int) -> Sequence[StartedWorker]:
        """Start some workers. Returns before they are up."""
        if self._process is None or self._process.poll() is not None:
            self._start_process()
        return [self._start_worker() for _ in range(number)]

    def close(self) -> None:
        """End all workers at once. May be called twice."""
        process, self._process = self._process, None
        if self._control is not None:
            self._control.close()  # the process ends its session
        if process is not None:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:  # it still imports
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start_process(self) -> None:
        self.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._workers = 0
        with theirs:
            program = PROGRAM.format(path=sys.path, module=self._module, control=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                env={**os.environ, **THREADS},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def _start_worker(self) -> StartedWorker:
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
        self._workers += 1
        return StartedWorker(ours, partial(self._ended, self._control, self._workers - 1))

    def _ended(self, control: socket.socket, number: int) -> str:
        """End a worker, and say how it ended."""
        try:
            control.send(NUMBER.pack(number))
            answer = control.recv(STATUS.size)
        except OSError:
            answer = b""
        if not answer:
            return f"ended together with all workers of this rank: their parent process was killed. {REMEDY}."
        return described(*STATUS.unpack(answer))


def described(process: int, status: int) -> str:
    """How a worker ended, by its wait status.

    9     ─▶  process 4711 was killed by signal 9 (Killed), …
    3<<8  ─▶  process 4711 ended itself with exit code 3, …
    """
    code = os.waitstatus_to_exitcode(status)
    lost = "its unfinished trajectories are lost"
    if code < 0:
        memory = (
            ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ", as a fault in C code does"
        )
        return f"process {process} was killed by signal {-code} ({signal.strsignal(-code)}){memory}; {lost}. {REMEDY}"
    return (
        f"process {process} ended itself with exit code {code}, as os._exit() in a tool, task or reward does; "
        f"{lost}. Raise an exception there instead"
    )


def fork_workers(control: int, serve: Callable[[socket.socket], None], imports: Sequence[str]) -> None:
    """The program of the process that is forked. It never returns; a worker ends after ``serve``.

    Args:
        control: descriptor of a socket. A message with a descriptor asks for a worker at that end of a connection; one
            with the number of a worker asks to end it.
        imports: modules that workers need.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # SLURM sends it to all processes: the rank decides when to end
        signal.signal(number, lambda *_: None)
    for module in imports:
        importlib.import_module(module)
    gc.freeze()  # a collection in a worker would copy the pages that it shares with the others
    requests, workers = socket.socket(fileno=control), list[int]()
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, NUMBER.size, 1)
        if not data:
            os.killpg(0, signal.SIGKILL)
        if not descriptors:
            (number,) = NUMBER.unpack(data)
            os.kill(workers[number], signal.SIGKILL)  # not yet waited for, so the id is its own
            requests.send(STATUS.pack(*os.waitpid(workers[number], 0)))
            continue
        process = os.fork()
        if process == 0:
            requests.close()
            serve(socket.socket(fileno=descriptors[0]))
            atexit._run_exitfuncs()  # and no more: libraries report what they free in a process that was forked
            os._exit(0)
        os.close(descriptors[0])
        workers.append(process)
