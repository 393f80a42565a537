"""Starts the sandbox's server process with an isolation backend that works on this machine, and talks to it.

Each backend is probed by running code in it that tries to escape.
"""

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from condensegrpo.core.errors import SandboxError
from condensegrpo.sandbox import folders, wire
from condensegrpo.sandbox.calls import CallOutcome, CallResult, Isolation, SandboxLimits
from condensegrpo.sandbox.seccomp import numbers

START_SECONDS = 30.0
END_SECONDS = 5.0
LATE_SECONDS = 20.0  # after its time limit a call is given up, though its supervisor should have ended it long ago
Request = Mapping[str, Any]  # what a supervisor reads, as JSON
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from condensegrpo.sandbox.server import main; main({control})"


class Call:
    """A call in progress."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._seconds = LATE_SECONDS

    def send(self, request: Request) -> None:
        """Send the request. If the server has ended, ``result`` reports it."""
        self._seconds += request["limits"]["seconds"]
        with suppress(wire.ConnectionLost):
            wire.send(self._end.fileno(), request)

    def result(self) -> CallResult:
        """Wait for the result."""
        try:
            if not _answered(self._end, self._seconds):
                return CallResult(outcome=CallOutcome.LOST, detail=f"no result after {self._seconds:g} seconds")
            report = wire.receive(self._end.fileno())
        except wire.ConnectionLost as error:
            return CallResult(outcome=CallOutcome.LOST, detail=str(error))
        finally:
            self._end.close()
        return CallResult(
            **{**report, "outcome": CallOutcome(report["outcome"]), "records": tuple(report.get("records", ()))}
        )

    def finish(self) -> None:
        """End the call, and still report its result so far."""
        with suppress(OSError):  # it has ended
            self._end.shutdown(socket.SHUT_WR)

    def cancel(self) -> None:
        """End the call. May be called from another thread, and twice."""
        with suppress(OSError):  # it has ended
            self._end.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close the copy of a forked process; the call goes on."""
        self._end.close()


def python_request(
    code: str, limits: SandboxLimits, stdin: str = "", files: Mapping[str, str] | None = None
) -> Request:
    """The request of a call that runs Python source."""
    return {"kind": "python", "code": code, "stdin": stdin, "files": dict(files or {}), "limits": asdict(limits)}


class Server:
    """A server process with one isolation backend, its control socket and its folder."""

    def __init__(self, isolation: Isolation, packages: Sequence[str] = ()) -> None:
        """Start the process."""
        self.isolation = isolation
        folders.remove_leftovers()
        self.folder, lock = folders.make()
        Path(self.folder).chmod(0o711)  # calls that run as another user reach their own folder in it
        self._lock = threading.Lock()
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()  # in progress, or ended and not yet collected
        self._control, theirs = socket.socketpair()
        # the last argument identifies the server in a list of processes
        program = (_PROGRAM.format(control=theirs.fileno()), str(Path(__file__).resolve().parents[2]), self.folder)
        with theirs:
            self._process = subprocess.Popen(
                [os.path.realpath(sys.executable), "-s", "-S", "-P", "-c", *program],
                env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"},  # reproducible results
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                pass_fds=(theirs.fileno(), lock),
                start_new_session=True,
            )
        os.close(lock)  # the server and its supervisors hold it
        try:
            self._open(packages)
        except BaseException:
            self.close()
            raise

    def call(self, channel: socket.socket | None = None) -> Call:
        """Start a call; ``Call.send`` then sends the request.

        Args:
            channel: a socket that its job shares with the job of another call; the caller closes it.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            ends = [theirs.fileno(), *([channel.fileno()] if channel else [])]
            try:
                with self._lock:
                    socket.send_fds(self._control, [b"c"], ends)
            except OSError as error:
                ours.close()
                raise SandboxError(
                    f"calling the sandbox: its server (process {self._process.pid}) has ended ({error}). "
                    f"It was killed from outside, for example for lack of memory."
                ) from error
        call = Call(ours)
        self._calls.add(call)
        return call

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process and every call in progress. May be called twice."""
        with self._lock:
            self._control.close()
            calls = list(self._calls)
        for call in calls:
            call.cancel()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # with its supervisors, and so their jobs
            self._process.wait()
        with suppress(OSError):  # the server did so, unless it was killed
            folders.remove(self.folder)

    def forget(self) -> None:
        """Close the copies of a forked process, so that server and calls end with their owner and not with this one."""
        self._control.close()
        for call in list(self._calls):
            call.forget()
        self._process.returncode = 0  # not a child of this process

    def _open(self, packages: Sequence[str]) -> None:
        shown = [str(Path(folder).resolve()) for folder in packages]
        request = {
            "isolation": self.isolation,
            "readable": _readable(shown),
            "packages": shown,
            "path": _standard_library(),
            "folder": self.folder,
        }
        try:
            wire.send(self._control.fileno(), request)
            if _answered(self._control, START_SECONDS):
                trouble = wire.receive(self._control.fileno())["trouble"]
            else:
                trouble = f"its server was not ready after {START_SECONDS:g} seconds"
        except wire.ConnectionLost as error:
            trouble = f"its server ended before it was ready: {error}"
        if trouble is not None:
            raise SandboxError(f"starting the sandbox with isolation={self.isolation}: {trouble}")
        if self.isolation is Isolation.NAMESPACES:
            Path(self.folder).rmdir()  # the server has mounted its root here


AUTO = "auto"
REMEDIES = {
    Isolation.NAMESPACES: "allow unprivileged user namespaces: sysctl -w user.max_user_namespaces=15000, and where "
    "they exist kernel.unprivileged_userns_clone=1 (Debian), kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); "
    "in Docker, --security-opt seccomp=unconfined",
    Isolation.LANDLOCK: "use Linux 6.2 or later with landlock among the modules in /sys/kernel/security/lsm",
}
# prints the names of the attempts that succeeded; the path of the secret is inserted as a Python literal
_ESCAPES = """
import ctypes, json, os, socket
def succeeds(attempt):
    try:
        attempt()
    except Exception:
        return False
    return True
secret, outside = {secret!r}, {outside!r}
libc = ctypes.CDLL(None)
def signal_outside():
    os.kill(outside, 0)
def namespaces():
    assert libc.unshare(0x10000000) == 0
def trace():
    assert libc.syscall({ptrace}, 0, 0, 0, 0) == 0
attempts = dict(
    read_a_file_outside=lambda: open(secret).read(),
    read_processes_outside=lambda: os.listdir(f"/proc/{{outside}}"),
    signal_a_process_outside=signal_outside,
    open_a_socket=lambda: socket.socket(),
    make_namespaces=namespaces,
    trace_processes=trace,
)
escapes = [name for name, attempt in attempts.items() if succeeds(attempt)]
import tempfile
with open("made", "w") as file:
    file.write("kept")
assert open("made").read() == "kept"
succeeds(lambda: open(secret + ".new", "w"))  # the prober checks whether that file exists outside
if os.environ:
    escapes.append("read_the_environment")
print(json.dumps(escapes))
"""


def open_server(isolation: str = AUTO, packages: Sequence[str] = ()) -> Server:
    """Start a server with a backend that works; ``auto`` takes the strongest one, and never ``none``."""
    if isolation == Isolation.NONE:
        return Server(Isolation.NONE, packages)
    candidates = [Isolation.NAMESPACES, Isolation.LANDLOCK] if isolation == AUTO else [Isolation(isolation)]
    faults = ""
    for candidate in candidates:
        try:
            return _probed(candidate, packages)
        except SandboxError as error:
            faults += f"  {candidate}: {error}\n    to enable it: {REMEDIES[candidate]}\n"
    raise SandboxError(
        f"opening the sandbox: no isolation backend works on this machine, so code of a model is not run.\n{faults}"
        f"  Or, on a disposable machine, set sandbox.isolation=none: code then runs with your own rights."
    )


def probe_backends() -> dict[Isolation, str | None]:
    """For each backend that confines, strongest first, why it does not work here; None if it works."""
    faults: dict[Isolation, str | None] = {}
    for isolation in (Isolation.NAMESPACES, Isolation.LANDLOCK):
        try:
            _probed(isolation, ()).close()
            faults[isolation] = None
        except SandboxError as error:
            faults[isolation] = str(error)
    return faults


def _probed(isolation: Isolation, packages: Sequence[str]) -> Server:
    """A server that code did not escape from, though it tried. SandboxError: it escaped, or did not run."""
    server = Server(isolation, packages)
    try:
        with tempfile.NamedTemporaryFile(prefix=folders.PREFIX, mode="w", encoding="ascii") as secret:
            fcntl.flock(secret, fcntl.LOCK_SH)  # not a leftover
            secret.write("not to be read")
            secret.flush()
            Path(secret.name).chmod(0o644)
            code = _ESCAPES.format(secret=secret.name, outside=os.getpid(), ptrace=numbers()["ptrace"])
            call = server.call()
            call.send(python_request(code, SandboxLimits()))
            result = call.result()
            written = Path(f"{secret.name}.new")
            if written.exists():
                written.unlink()
                raise SandboxError("confined code was able to write a file outside")
        if result.outcome is not CallOutcome.FINISHED:
            raise SandboxError(f"a probe call ended as {result.outcome}: {(result.detail or result.stderr).strip()}")
        if escapes := json.loads(result.stdout):
            raise SandboxError(f"confined code was able to {', '.join(escapes).replace('_', ' ')}")
    except BaseException:
        server.close()
        raise
    return server


def _answered(end: socket.socket, seconds: float) -> bool:
    """Wait for data or the end of a socket; False if neither came in time."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _standard_library() -> list[str]:
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    paths = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    return list(dict.fromkeys([*paths, f"{paths[1]}/lib-dynload"]))


def _readable(packages: Sequence[str]) -> list[str]:
    """Python, the system's programs and libraries, and the packages: each path once, none within another."""
    library = sysconfig.get_config_var("LIBDIR")
    paths = [*_SYSTEM, os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix), *packages]
    paths += [os.path.realpath(path) for path in (*_standard_library(), *([library] if library else []))]
    kept: list[str] = []
    for path in sorted(filter(os.path.exists, set(paths))):
        if not any(Path(path).is_relative_to(other) and not os.path.islink(other) for other in kept):
            kept.append(path)
    return kept
