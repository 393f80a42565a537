"""The process that runs the code of one call: confines itself irrevocably, then runs it. Standard library only."""

import io
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from condensegrpo.sandbox import linux, namespaces, seccomp
from condensegrpo.sandbox.calls import Backend, Isolation, SandboxLimits
from condensegrpo.sandbox.candidate import NAME, execute, finish, fresh, serve_candidate
from condensegrpo.sandbox.judge import judge

CHANNEL, RECORDS = 3, 4  # file descriptors after the three standard ones
KEPT = {"python": 3, "candidate": 4, "judge": 5}  # how many of them the code of a request has
OPEN_FILES = 64  # of the code of a request, at a time
TROUBLE = "trouble: "  # starts a record that says why the code was not run
PATH = "/usr/local/bin:/usr/bin:/bin"


class Descriptors(NamedTuple):
    """The file descriptors of a job."""

    stdin: int
    stdout: int
    stderr: int
    records: int  # a socket to the supervisor; closed before untrusted code runs
    channel: int | None  # between a judge and its candidate


def become(request: Mapping[str, Any], limits: SandboxLimits, backend: Backend, box: str, fds: Descriptors) -> NoReturn:
    """Become the job of a request. If this process cannot be confined, it reports that and does not run the code."""
    status = 70
    try:
        _confine(request, limits, backend, box, fds)
        if request["kind"] == "judge":
            status = judge(**request["judged"], channel=CHANNEL, records=RECORDS)
        else:
            os.close(RECORDS)
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(line_buffering=True)  # output survives a kill
            if request["kind"] == "candidate":
                status = serve_candidate(request["code"], CHANNEL)
            else:
                status = finish(execute(request["code"], fresh("__main__")))
    except BaseException as error:  # the boundary of a process: nothing may run after it
        with suppress(OSError):  # closed once the code runs: the error is then the code's
            os.write(RECORDS, f"{TROUBLE}{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def _confine(request: Mapping[str, Any], limits: SandboxLimits, backend: Backend, box: str, fds: Descriptors) -> None:
    _take(fds)
    os.setsid()
    if backend.isolation is Isolation.NAMESPACES:
        namespaces.open_box(limits)
    elif backend.as_nobody:
        namespaces.as_nobody()
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which resets it
    os.chdir(box)
    os.umask(0o077)
    write_files(box, request["files"])
    limit_process(limits, count_processes=backend.isolation is Isolation.NAMESPACES)
    if backend.isolation is Isolation.LANDLOCK:
        linux.confine_files((*backend.readable, "/dev/urandom", "/dev/random"), (box, "/dev/null"))
        listener = seccomp.count_writes(KEPT[request["kind"]])
        with socket.socket(fileno=os.dup(RECORDS)) as records:  # the supervisor decides about calls that take space
            socket.send_fds(records, [b"\n"], [listener])
        os.close(listener)
    if backend.isolation is not Isolation.NONE:
        linux.drop_capabilities()
        seccomp.confine_syscalls(alone=backend.isolation is Isolation.LANDLOCK, pinned=KEPT[request["kind"]])
    os.environ.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in sys.modules if name.split(".")[0] == "condensegrpo"]:
        del sys.modules[name]
    sys.path[:] = [box, *sys.path]
    sys.argv = [NAME]


def write_files(box: str, files: Mapping[str, str]) -> None:
    """Write files into a folder."""
    for name, text in files.items():
        parts = Path(name).parts
        if not parts or name.startswith("/") or ".." in parts:
            raise ValueError(f"writing {name!r} into the sandbox: wanted a path within its folder")
        path = Path(box, *parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))


def _take(fds: Descriptors) -> None:
    """Move the descriptors to their numbers and close all others."""
    spare = os.open(os.devnull, os.O_RDWR)
    ends = (fds.stdin, fds.stdout, fds.stderr, spare if fds.channel is None else fds.channel, fds.records)
    # moved up first: one may have the number that another needs
    high = [os.dup2(end, 100 + number) for number, end in enumerate(ends)]
    for number, end in enumerate(high):
        os.dup2(end, number, inheritable=number < CHANNEL)
    os.closerange(RECORDS + 1, 1 << 20)
    if fds.channel is None:
        os.close(CHANNEL)


def cpu_limit(limits: SandboxLimits) -> int:
    """Seconds of CPU time of a process after which the kernel ends it; the wall clock may end it before."""
    return int(limits.seconds) + 1


def limit_process(limits: SandboxLimits, *, count_processes: bool, open_files: int | None = OPEN_FILES) -> None:
    """Set the limits that the kernel enforces for this process and those that it starts.

    Args:
        open_files: at a time, of a process; None: as before.
    """
    seconds = cpu_limit(limits)
    every = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.disk_bytes // 2,
        resource.RLIMIT_CORE: 1,  # 0 would still start a program that handles core dumps
        resource.RLIMIT_STACK: 8 << 20,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,  # timers too; counted for all processes of the user
    }
    if open_files is not None:
        every[resource.RLIMIT_NOFILE] = open_files
    if count_processes:  # counted per user and user namespace, the supervisor and the first process included
        every[resource.RLIMIT_NPROC] = limits.processes + 2
    for kind, value in every.items():
        _, hard = resource.getrlimit(kind)
        soft, top = value if isinstance(value, tuple) else (value, value)
        if hard != resource.RLIM_INFINITY:
            soft, top = min(soft, hard), min(top, hard)
        resource.setrlimit(kind, (soft, top))
