"""The process that supervises one call: starts its job, enforces its limits, reads its output, and cleans up.

It runs outside the confinement of the job, which cannot reach it. Standard library only.
"""

import errno
import fcntl
import os
import re
import resource
import selectors
import signal
import socket
import struct
import tempfile
import time
from contextlib import suppress
from typing import Any, NamedTuple

from condensegrpo.sandbox import job, linux, namespaces, wire
from condensegrpo.sandbox.calls import Backend, CallOutcome, Isolation, SandboxLimits
from condensegrpo.sandbox.folders import remove
from condensegrpo.sandbox.seccomp import WRITES, numbers

FIRST_CHECK, CHECK_EVERY = 0.05, 0.1  # seconds between checks of what a job uses
CPU_TICK = 0.05  # seconds by which the kernel's accounts of CPU time may differ
_MOST_RECORDS = 4 << 20
_PIPE = 1 << 16
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def supervise(call: int, channel: int | None, backend: Backend) -> None:
    """Serve one call: read its request, run its job and send the result."""
    box = None
    try:
        request = wire.receive(call)
        limits = SandboxLimits(**request["limits"])
        if backend.isolation is Isolation.NAMESPACES:
            box = namespaces.BOX
            namespaces.enter_call(backend.proc)
        else:
            box = tempfile.mkdtemp(dir=backend.folder)
            if backend.as_nobody:
                os.chown(box, namespaces.NOBODY, namespaces.NOBODY)
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)  # orphans are reparented to this process, which kills them
        report = _Supervisor(call, limits, backend, box).run(request, channel)
    except wire.ConnectionLost:
        return
    except Exception as error:  # the boundary of a process: reported to the caller
        report = {"outcome": CallOutcome.LOST, "detail": f"{type(error).__name__}: {error}"}
    with suppress(wire.ConnectionLost):  # the caller is gone
        wire.send(call, report)
    if box is not None and backend.isolation is not Isolation.NAMESPACES:
        with suppress(OSError):  # without confinement, other processes may use it; the server tries again
            remove(box)  # after the report: a file system may take seconds to remove two thousand folders


class OutputBuffer:
    """The first and the last bytes of a stream, at most ``limit`` together."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        """Append bytes of the stream."""
        self._total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > self._half:
            del self._tail[: -self._half]

    def text(self) -> str:
        """The kept bytes as readable text, with a mark where bytes were omitted."""
        omitted = self._total - len(self._head) - len(self._tail)
        if not omitted:
            return readable(bytes(self._head + self._tail))
        return f"{readable(bytes(self._head))}\n[… {omitted} bytes omitted …]\n{readable(bytes(self._tail))}"


def readable(data: bytes) -> str:
    r"""Decode bytes for a terminal and a model: ESC becomes ``\x1b``; tabs and line ends stay."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class _Supervisor:
    """Runs one job from start to end."""

    def __init__(self, call: int, limits: SandboxLimits, backend: Backend, box: str) -> None:
        self._call = call
        self._limits = limits
        self._backend = backend
        self._box = box
        self._pid = self._init = 0
        self._stopped_by = 0  # the signal that stopped the job
        self._stop: CallOutcome | None = None
        self._streams: dict[int, OutputBuffer] = {}
        self._disk: DiskBudget | None = None

    def run(self, request: dict[str, Any], channel: int | None) -> dict[str, Any]:
        """Start the job, wait for its end, and return the report."""
        begin = time.monotonic()
        (out, out_job), (err, err_job), (records_end, records_job) = os.pipe(), os.pipe(), socket.socketpair()
        records = records_end.fileno()
        ends = job.Descriptors(_filled(request["stdin"]), out_job, err_job, records_job.detach(), channel)
        if self._backend.isolation is Isolation.NAMESPACES:
            self._init = namespaces.fork_init()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._call)
            job.become(request, self._limits, self._backend, self._box, ends)
        for end in ends:
            if end is not None:
                os.close(end)
        self._streams = {
            out: OutputBuffer(self._limits.output_bytes),
            err: OutputBuffer(self._limits.output_bytes),
            records: OutputBuffer(_MOST_RECORDS),
        }
        if self._backend.isolation is Isolation.LANDLOCK:
            text, listeners, _, _ = socket.recv_fds(records_end, _PIPE, 1)  # once the job is confined, or says why not
            self._streams[records].add(text)
            self._disk = DiskBudget(listeners[0], self._limits) if listeners else None
        for end in self._streams:
            os.set_blocking(end, False)  # the call's socket stays blocking: else a long report would be cut off
        self._wait(begin)
        status = self._end()
        lines = self._streams[records].text().splitlines()
        return {
            **self._outcome(status, lines),
            "stdout": self._streams[out].text(),
            "stderr": self._streams[err].text(),
            "status": None if status < 0 else status,
            "signal": self._stopped_by or (-status if status < 0 else None),
            "seconds": time.monotonic() - begin,
            "cpu_seconds": _cpu_seconds(),
            "records": [line for line in lines if line and not line.startswith(job.TROUBLE)],
        }

    def _wait(self, begin: float) -> None:
        """Read the job's streams until it has ended or exceeds a limit."""
        deadline, check = begin + self._limits.seconds, begin + FIRST_CHECK
        ended = os.pidfd_open(self._pid)
        with selectors.DefaultSelector() as selector:
            for end in (*self._streams, ended, self._call, *([self._disk.listener] if self._disk else [])):
                selector.register(end, selectors.EVENT_READ)
            while self._stop is None:
                now = time.monotonic()
                if now >= deadline:
                    self._stop = CallOutcome.TIMEOUT
                    return
                if now >= check:
                    check = now + CHECK_EVERY
                    self._stop = self._exceeded()
                ready = {key.fd for key, _ in selector.select(max(0.0, min(deadline, check) - now))}
                for end in ready & self._streams.keys():
                    if not self._read(end):
                        selector.unregister(end)
                if self._disk is not None and self._disk.listener in ready:
                    self._disk.answer()
                if self._call in ready:
                    self._stop = CallOutcome.CANCELLED  # the caller sends nothing more: it closed the socket
                if ended in ready:
                    return

    def _read(self, end: int, *, at_block: bool = True) -> bool:
        """Read some of a stream; False at its end, ``at_block`` if nothing can be read right now."""
        try:
            data = os.read(end, _PIPE)
        except BlockingIOError:
            return at_block
        self._streams[end].add(data)
        return bool(data)

    def _exceeded(self) -> CallOutcome | None:
        """The exceeded limit, of those that the kernel does not enforce; KILLED if the job was stopped for good."""
        with suppress(ChildProcessError):  # it has ended
            stopped = os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            if stopped is not None:
                self._stopped_by = stopped.si_status
                return CallOutcome.KILLED
        used = of_descendants(os.getpid(), self._backend.proc, besides=self._init)
        if used.memory > self._limits.memory_bytes:
            return CallOutcome.MEMORY
        if used.tasks > self._limits.processes:
            return CallOutcome.PROCESSES
        if self._backend.isolation is Isolation.NONE and folder_exceeds(self._box, self._limits):
            return CallOutcome.DISK
        return None

    def _end(self) -> int:
        """End every process of the job; its exit status, or −signal."""
        if self._stop is not None:
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        if self._init:
            os.kill(self._init, signal.SIGKILL)
            os.waitpid(self._init, 0)  # and for all processes of its namespace
        else:
            end_orphans(self._backend.proc)
        for end in self._streams:
            while self._read(end, at_block=False):
                pass
        return os.waitstatus_to_exitcode(status)

    def _outcome(self, status: int, lines: list[str]) -> dict[str, str]:
        if self._stop is not None:
            return {"outcome": self._stop, "detail": _ended_by(self._stopped_by)}
        trouble = next((line for line in lines if line.startswith(job.TROUBLE)), None)
        if trouble is not None:
            return {"outcome": CallOutcome.LOST, "detail": trouble.removeprefix(job.TROUBLE)}
        if status < 0:
            limit = job.cpu_limit(self._limits) - CPU_TICK
            if -status in (signal.SIGXCPU, signal.SIGKILL) and _cpu_seconds() >= limit:
                return {"outcome": CallOutcome.TIMEOUT, "detail": ""}
            return {"outcome": CallOutcome.KILLED, "detail": _ended_by(-status)}
        return {"outcome": CallOutcome.FINISHED if status == 0 else CallOutcome.FAILED, "detail": ""}


def _ended_by(number: int) -> str:
    """``it was ended by SIGKILL``; nothing for no signal."""
    names = {each.value: each.name for each in signal.Signals}
    verb = "stopped" if number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU) else "ended"
    return f"it was {verb} by {names.get(number, f'signal {number}')}" if number else ""


def end_orphans(proc: int) -> None:
    """Kill the descendants of this process: orphans too, which are reparented to it."""
    while pids := of_descendants(os.getpid(), proc).pids:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def _filled(text: str) -> int:
    """A file descriptor from which this text can be read, and to which nothing can be written."""
    file = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(file, text.encode("utf-8", "surrogateescape"))
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    )
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


BLOCKS = 8192  # bytes that a call can take besides its own: a write begins and ends in a block, a name needs one too
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1  # SECCOMP_IOCTL_NOTIF_…, SECCOMP_USER_NOTIF_FLAG_CONTINUE
_CALL = struct.Struct("=Q8xi12x6Q")  # struct seccomp_notif: id, number of the call, its arguments
_ANSWER = struct.Struct("=QqiI")  # struct seccomp_notif_resp: id, result, −errno, flags


class DiskBudget:
    """What a call may still put on disk where no file system of its own limits it.

        job          write(7, …, 8192)  ──▶  supervisor: 8192 bytes are left  ──▶  the kernel goes on with the call
                     open("x", O_CREAT) ──▶  supervisor: no entry is left     ──▶  ENOSPC

    The kernel stops the job at every call that can take space (``seccomp.count_writes``) until the supervisor has
    decided. Only numbers in registers count, which the job cannot change meanwhile. Freed space does not count.
    """

    def __init__(self, listener: int, limits: SandboxLimits) -> None:
        self.listener = listener  # file descriptor; readable while a call waits for its answer
        self._bytes = limits.disk_bytes
        self._entries = limits.files
        self._writes = {numbers()[name] for name in WRITES}

    def answer(self) -> None:
        """Let a waiting call go on if it fits what is left, else let it fail with ENOSPC."""
        message = bytearray(_CALL.size)
        try:
            fcntl.ioctl(self.listener, _RECEIVE, message)
            identity, call, _, _, size, *_ = _CALL.unpack(message)
            writes = call in self._writes
            space = BLOCKS + (size if writes else 0)
            fits = space <= self._bytes and (writes or self._entries > 0)
            if fits:
                self._bytes -= space
                self._entries -= not writes
            fcntl.ioctl(
                self.listener, _SEND, _ANSWER.pack(identity, 0, *((0, _CONTINUE) if fits else (-errno.ENOSPC, 0)))
            )
        except FileNotFoundError:
            pass  # a signal interrupted the call, which asks again, or the job has ended


_PAGE = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """The usage of all descendants of a process."""

    tasks: int  # processes and threads
    memory: int  # resident bytes; pages shared by two processes count twice
    pids: tuple[int, ...]


def of_descendants(pid: int, proc: int, *, besides: int = 0) -> Usage:
    """The usage of all descendants of a process with one thread, ``besides`` one of them.

    ``proc`` is a file descriptor of /proc.
    """
    tasks = memory = 0
    pids = []
    waiting = [*map(int, _read(f"{pid}/task/{pid}/children", proc).split())]
    while waiting:
        current = waiting.pop()
        try:
            threads = _list(f"{current}/task", proc)
        except OSError:
            continue  # it has ended
        resident = 0  # every thread shows the pages of its process, except for one that has ended
        for thread in threads:
            with suppress(OSError, IndexError):  # this thread has ended, the others count
                waiting += map(int, _read(f"{current}/task/{thread}/children", proc).split())
                resident = max(resident, int(_read(f"{current}/task/{thread}/statm", proc).split()[1]))
        if current != besides:
            memory += resident * _PAGE
            tasks += len(threads)
            pids.append(current)
    return Usage(tasks, memory, tuple(pids))


def folder_exceeds(folder: str, limits: SandboxLimits) -> bool:
    """Whether a folder holds more bytes or entries than allowed, or more than can be counted."""
    total = entries = 0
    try:
        for _, folders, names, descriptor in os.fwalk(folder, onerror=_refuse):
            for name in (*folders, *names):
                with suppress(FileNotFoundError):  # removed meanwhile
                    total += os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks * 512
                entries += 1
            if total > limits.disk_bytes or entries > limits.files:
                return True
    except FileNotFoundError:
        pass  # the code removed its own folder
    except (OSError, RecursionError):  # unreadable, or very deep
        return True
    return False


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _read(path: str, proc: int) -> str:
    file = os.open(path, os.O_RDONLY, dir_fd=proc)
    try:
        return os.read(file, 1 << 16).decode("ascii", "replace")
    finally:
        os.close(file)


def _list(path: str, proc: int) -> list[str]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    try:
        return os.listdir(folder)
    finally:
        os.close(folder)
