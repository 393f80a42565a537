"""The process beside one call: starts its job, holds it to its limits, reads what it prints, and clears up.

It stands outside whatever the job is confined to, so that nothing the job does reaches it. Standard library only.
"""

import math
import os
import resource
import selectors
import signal
import subprocess
import tempfile
import time
from typing import Any

from condensegrpo.sandbox import job, linux, namespaces, watch, wire
from condensegrpo.sandbox.captured import Captured
from condensegrpo.sandbox.limits import SandboxLimits
from condensegrpo.sandbox.ran import Outcome
from condensegrpo.sandbox.setting import Rung, Setting

LOOK_FIRST, LOOK_EVERY = 0.05, 0.1  # seconds between looks at what a job uses
_MOST_RECORDS = 4 << 20
_PIPE = 1 << 16


def keep(call: int, channel: int | None, setting: Setting) -> None:
    """Serve one call: read its request, run its job and send what came of it."""
    box = None
    try:
        request = wire.receive(call)
        limits = SandboxLimits(**request["limits"])
        if setting.rung is Rung.NAMESPACES:
            box = namespaces.BOX
            namespaces.enter_call(setting.proc)
        else:
            box = _make_box(setting)
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)  # orphans come here, to be ended
        report = _Watcher(call, limits, setting, box).run(request, channel)
    except wire.Lost:
        return
    except Exception as error:  # the boundary of a process: whoever asked is told
        report = {"outcome": Outcome.LOST, "detail": f"{type(error).__name__}: {error}"}
    if box is not None and setting.rung is not Rung.NAMESPACES:
        remove(box)
    try:
        wire.send(call, report)
    except wire.Lost:
        return  # whoever asked has gone


def remove(folder: str) -> None:
    """Remove a folder, however deep; not by shutil.rmtree, which holds a file descriptor a level."""
    subprocess.run(["rm", "-rf", "--", folder], check=False, stdin=subprocess.DEVNULL, env={"PATH": job.PATH})


def _make_box(setting: Setting) -> str:
    box = tempfile.mkdtemp(dir=setting.folder)
    if setting.nobody:
        os.chown(box, namespaces.NOBODY, namespaces.NOBODY)
    return box


class _Watcher:
    """One job from its start to its end."""

    def __init__(self, call: int, limits: SandboxLimits, setting: Setting, box: str) -> None:
        self._call = call
        self._limits = limits
        self._setting = setting
        self._box = box
        self._pid = 0
        self._stop: Outcome | None = None
        self._streams: dict[int, Captured] = {}

    def run(self, request: dict[str, Any], channel: int | None) -> dict[str, Any]:
        """Start the job, wait for its end, and report."""
        begin = time.monotonic()
        (out, out_job), (err, err_job), (records, records_job) = os.pipe(), os.pipe(), os.pipe()
        ends = job.Ends(_filled(request["stdin"]), out_job, err_job, records_job, channel)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._call)
            job.become(request, self._limits, self._setting, self._box, ends)
        for end in ends:
            if end is not None:
                os.close(end)
        for end in (out, err, records):
            os.set_blocking(end, False)  # but not the call's: a long report would be cut off
        self._streams = {
            out: Captured(self._limits.output_bytes),
            err: Captured(self._limits.output_bytes),
            records: Captured(_MOST_RECORDS),
        }
        self._wait(begin)
        status = self._end()
        lines = self._streams[records].text().splitlines()
        return {
            **self._outcome(status, lines),
            "stdout": self._streams[out].text(),
            "stderr": self._streams[err].text(),
            "status": None if status < 0 else status,
            "signal": -status if status < 0 else None,
            "seconds": time.monotonic() - begin,
            "cpu_seconds": _cpu_seconds(),
            "records": [line for line in lines if not line.startswith(job.TROUBLE)],
        }

    def _wait(self, begin: float) -> None:
        """Read the job's streams until it has ended, or must."""
        deadline, look = begin + self._limits.seconds, begin + LOOK_FIRST
        ended = os.pidfd_open(self._pid)
        with selectors.DefaultSelector() as selector:
            for end in (*self._streams, ended, self._call):
                selector.register(end, selectors.EVENT_READ)
            while self._stop is None:
                now = time.monotonic()
                if now >= deadline:
                    self._stop = Outcome.TIMEOUT
                    return
                if now >= look:
                    look = now + LOOK_EVERY
                    self._stop = self._over()
                ready = {key.fd for key, _ in selector.select(max(0.0, min(deadline, look) - now))}
                for end in ready & self._streams.keys():
                    if not self._read(end):
                        selector.unregister(end)
                if self._call in ready:
                    self._stop = Outcome.CANCELLED  # a request is one message: more can only be the end
                if ended in ready:
                    return

    def _read(self, end: int) -> bool:
        """Read some of a stream; False at its end."""
        try:
            data = os.read(end, _PIPE)
        except BlockingIOError:
            return True
        self._streams[end].add(data)
        return bool(data)

    def _over(self) -> Outcome | None:
        """The limit that the job is over right now, of those that the kernel does not hold it to."""
        found = watch.use(self._pid, self._setting.proc)
        if found.memory > self._limits.memory_bytes:
            return Outcome.MEMORY
        if found.tasks > self._limits.processes:
            return Outcome.PROCESSES
        if self._setting.rung is not Rung.NAMESPACES:
            total, entries = watch.size(self._box, files=self._limits.files)
            if total > self._limits.disk_bytes or entries > self._limits.files:
                return Outcome.DISK
        return None

    def _end(self) -> int:
        """End everything that the job started; its exit status, or −signal."""
        if self._stop is not None:
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)  # with process namespaces, all the others are gone by then
        if self._setting.rung is not Rung.NAMESPACES:
            _end_orphans(self._setting.proc)
        for end in self._streams:
            while self._drain(end):
                pass
        return os.waitstatus_to_exitcode(status)

    def _drain(self, end: int) -> bool:
        """Read what is left in a stream whose writers are gone; False when nothing is."""
        try:
            data = os.read(end, _PIPE)
        except BlockingIOError:
            return False
        self._streams[end].add(data)
        return bool(data)

    def _outcome(self, status: int, lines: list[str]) -> dict[str, str]:
        if self._stop is not None:
            return {"outcome": self._stop, "detail": ""}
        trouble = next((line for line in lines if line.startswith(job.TROUBLE)), None)
        if trouble is not None:
            return {"outcome": Outcome.LOST, "detail": trouble.removeprefix(job.TROUBLE)}
        if status < 0:
            cpu = -status in (signal.SIGXCPU, signal.SIGKILL) and _cpu_seconds() >= math.floor(self._limits.seconds)
            return {"outcome": Outcome.TIMEOUT if cpu else Outcome.KILLED, "detail": ""}
        return {"outcome": Outcome.FINISHED if status == 0 else Outcome.FAILED, "detail": ""}


def _end_orphans(proc: int) -> None:
    """End the processes that a job left behind: this process inherits them."""
    while pids := watch.use(os.getpid(), proc).pids[1:]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        time.sleep(0.001)


def _filled(text: str) -> int:
    """A file descriptor that reads as this text and then ends."""
    file = os.memfd_create("stdin")
    os.write(file, text.encode("utf-8", "surrogateescape"))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
