"""The sandbox's server: enters its rung once, then forks a keeper for every call. Standard library only.

Run by ``process.start`` as a program of its own, with an empty environment and one socket.
"""

import gc
import importlib
import os
import signal
import socket
import sys
from contextlib import suppress

from condensegrpo.sandbox import keeper, linux, namespaces, wire
from condensegrpo.sandbox.keeper import remove
from condensegrpo.sandbox.setting import Rung, Setting

# loaded before any call, so that none pays for them
_WARM = (
    *(
        "abc",
        "ast",
        "bisect",
        "collections",
        "copy",
        "dataclasses",
        "datetime",
        "decimal",
        "enum",
        "fractions",
        "functools",
    ),
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
            byte, calls, _, _ = socket.recv_fds(ends, 1, 2)
            if not byte:
                break
            if os.fork() == 0:
                _serve(control, calls, setting)
            for call in calls:
                os.close(call)
    _leave(setting)


def _serve(control: int, calls: list[int], setting: Setting) -> None:
    try:
        os.close(control)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        linux.prctl(linux.PR_SET_PDEATHSIG, 0)
        keeper.keep(calls[0], calls[1] if len(calls) > 1 else None, setting)
    finally:
        os._exit(0)


def _leave(setting: Setting) -> None:
    """Wait for the keepers, who end their jobs when whoever asked has gone, and remove what is ours outside."""
    with suppress(ChildProcessError):
        os.wait()  # with SIGCHLD ignored: until there are no children any more
    if setting.rung is not Rung.NAMESPACES:
        remove(setting.folder)


def _enter(rung: Rung, given: dict[str, list[str]]) -> Setting:
    readable, packages, folder = tuple(given["readable"]), tuple(given["packages"]), str(given["folder"])
    if rung is Rung.NAMESPACES:
        proc = namespaces.enter(folder, readable)
    else:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    nobody = rung is Rung.LANDLOCK and os.geteuid() == 0 and _nobody_manages(os.__file__, folder)
    return Setting(rung=rung, readable=readable, packages=packages, folder=folder, proc=proc, nobody=nobody)


def _nobody_manages(python: str, folder: str) -> bool:
    """Whether the user nobody can read Python and reach our folder, found out by trying."""
    pid = os.fork()
    if pid == 0:
        namespaces.as_nobody()
        reached = os.access(python, os.R_OK) and os.access(folder, os.X_OK)
        os._exit(0 if os.geteuid() != 0 and reached else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
