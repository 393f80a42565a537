"""The sandbox's server: enters its rung once, then forks a keeper for every call. Standard library only.

Run by ``process.start`` as a program of its own, with an empty environment and one socket.
"""

import gc
import importlib
import os
import signal
import socket
import sys

from condensegrpo.sandbox import keeper, linux, namespaces, wire
from condensegrpo.sandbox.setting import Rung, Setting

# loaded before any call, so that none pays for them
_WARM = (
    *("abc", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools"),
    *("heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "traceback", "typing"),
)


def main(control: int) -> None:
    """Serve calls until the other end of the socket closes.

    Each message is one byte with one or two file descriptors: the call, and a channel to another call.
    """
    given = wire.receive(control)
    try:
        setting = _enter(Rung(given["rung"]), given)
    except OSError as error:
        wire.send(control, {"trouble": str(error)})
        return
    for name in _WARM:
        importlib.import_module(name)
    sys.path[:] = [*given["path"], *setting.packages]
    gc.collect()
    gc.freeze()  # pages that calls share stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no burial
    wire.send(control, {"trouble": None})
    with socket.socket(fileno=control) as ends:
        while True:
            byte, (*calls,), _, _ = socket.recv_fds(ends, 1, 2)
            if not byte:
                return
            if os.fork() == 0:
                _serve(control, calls, setting)
            for call in calls:
                os.close(call)


def _serve(control: int, calls: list[int], setting: Setting) -> None:
    try:
        os.close(control)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        linux.prctl(linux.PR_SET_PDEATHSIG, 0)
        keeper.keep(calls[0], calls[1] if len(calls) > 1 else None, setting)
    finally:
        os._exit(0)


def _enter(rung: Rung, given: dict[str, list[str]]) -> Setting:
    readable, packages, folder = tuple(given["readable"]), tuple(given["packages"]), str(given["folder"])
    if rung is Rung.NAMESPACES:
        proc = namespaces.enter(folder, readable)
    else:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    nobody = rung is not Rung.NAMESPACES and os.geteuid() == 0 and _nobody_reads(os.__file__, folder)
    return Setting(rung=rung, readable=readable, packages=packages, folder=folder, proc=proc, nobody=nobody)


def _nobody_reads(*paths: str) -> bool:
    """Whether the user nobody can read all of these, found out by trying."""
    pid = os.fork()
    if pid == 0:
        namespaces.as_nobody()
        os._exit(0 if os.geteuid() != 0 and all(os.access(path, os.R_OK) for path in paths) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
