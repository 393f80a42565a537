"""The process that runs what was asked, once: confines itself for good, then runs it. Standard library only."""

import io
import os
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from condensegrpo.sandbox import landlock, linux, namespaces, seccomp
from condensegrpo.sandbox.callee import serve
from condensegrpo.sandbox.judge import judge
from condensegrpo.sandbox.limits import SandboxLimits
from condensegrpo.sandbox.script import NAME, fresh, run
from condensegrpo.sandbox.setting import Rung, Setting

CHANNEL, RECORDS = 3, 4  # file descriptors after the three usual ones
TROUBLE = "trouble: "  # begins a record that tells why the code was never run
PATH = "/usr/local/bin:/usr/bin:/bin"


class Ends(NamedTuple):
    """File descriptors that the job is given."""

    stdin: int
    stdout: int
    stderr: int
    records: int  # to the keeper; closed before code runs that nobody vouches for
    channel: int | None  # between a judge and its callee


def become(request: Mapping[str, Any], limits: SandboxLimits, setting: Setting, box: str, ends: Ends) -> NoReturn:
    """Become the job of a request. Whatever cannot be confined as it should is told to the keeper and not run."""
    status = 70
    try:
        _confine(request, limits, setting, box, ends)
        status = _work(request)
    except BaseException as error:  # the boundary of a process: nothing may run on behind it
        with suppress(OSError):  # closed once the code runs: then it is the code's own doing
            os.write(RECORDS, f"{TROUBLE}{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def _confine(request: Mapping[str, Any], limits: SandboxLimits, setting: Setting, box: str, ends: Ends) -> None:
    _take(ends)
    os.setsid()
    if setting.rung is Rung.NAMESPACES:
        namespaces.open_box(limits)
    elif setting.nobody:
        namespaces.as_nobody()
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # after a change of user, which forgets it
    os.chdir(box)
    os.umask(0o077)
    write_files(box, request["files"])
    _limit(limits, count_processes=setting.rung is Rung.NAMESPACES)
    if setting.rung is Rung.LANDLOCK:
        landlock.confine((*setting.readable, "/dev/zero", "/dev/urandom", "/dev/random"), (box, "/dev/null"))
    if setting.rung is not Rung.NONE:
        linux.drop_capabilities()
        seccomp.confine(alone=setting.rung is Rung.LANDLOCK)
    os.environ.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in sys.modules if name.split(".")[0] == "condensegrpo"]:
        del sys.modules[name]
    sys.path[:] = [box, *sys.path]
    sys.argv = [NAME]


def _work(request: Mapping[str, Any]) -> int:
    kind = request["kind"]
    if kind == "judge":
        return judge(request, CHANNEL, RECORDS)
    os.close(RECORDS)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what was printed outlives a kill
    if kind == "callee":
        return serve(request["code"], CHANNEL)
    return run(request["code"], fresh("__main__"))


def write_files(box: str, files: Mapping[str, str]) -> None:
    """Put files into a folder.

    Raises:
        ValueError: a name leads out of it.
    """
    for name, text in files.items():
        parts = Path(name).parts
        if not parts or name.startswith("/") or ".." in parts:
            raise ValueError(f"writing {name!r} into the sandbox: wanted a path within its folder")
        place = Path(box, *parts)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode("utf-8", "surrogateescape"))


def _take(ends: Ends) -> None:
    """Put the ends at their numbers and close everything else."""
    spare = os.open(os.devnull, os.O_RDWR)
    given = (ends.stdin, ends.stdout, ends.stderr, spare if ends.channel is None else ends.channel, ends.records)
    # moved up first: one of them may lie where another belongs
    high = [os.dup2(end, 100 + place) for place, end in enumerate(given)]
    for place, end in enumerate(high):
        os.dup2(end, place, inheritable=place < CHANNEL)
    os.closerange(RECORDS + 1, 1 << 20)
    if ends.channel is None:
        os.close(CHANNEL)


def _limit(limits: SandboxLimits, *, count_processes: bool) -> None:
    seconds = int(limits.seconds) + 1
    every = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 1,  # 0 would still start a program that takes core dumps
        resource.RLIMIT_STACK: 8 << 20,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if count_processes:  # of this user in this user namespace: the keeper is one of them
        every[resource.RLIMIT_NPROC] = limits.processes + 1
    for kind, value in every.items():
        _, hard = resource.getrlimit(kind)
        soft, top = value if isinstance(value, tuple) else (value, value)
        if hard != resource.RLIM_INFINITY:
            soft, top = min(soft, hard), min(top, hard)
        resource.setrlimit(kind, (soft, top))
