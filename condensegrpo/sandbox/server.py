"""The sandbox's server: sets up its isolation backend once, then forks a supervisor per call. Standard library only.

Run by ``process.Server`` as a program of its own, with an empty environment and one socket.
"""

import gc
import importlib
import os
import signal
import socket
import sys
from contextlib import suppress

from condensegrpo.sandbox import linux, namespaces, supervisor, wire
from condensegrpo.sandbox.calls import Backend, Isolation
from condensegrpo.sandbox.folders import remove

# imported before the first call, so that calls start faster
_WARM = (
    *("abc", "ast", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions"),
    *("functools", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string"),
    *("traceback", "typing"),
)


def main(control: int) -> None:
    """Serve calls until the other end of the socket closes.

    Each message is one byte with one or two file descriptors: the call's socket, and a channel to another call.
    """
    request = wire.receive(control)
    try:
        backend = _enter(Isolation(request["isolation"]), request)
    except OSError as error:
        wire.send(control, {"trouble": str(error)})
        return
    for name in _WARM:
        importlib.import_module(name)
    sys.path[:] = [*request["path"], *backend.packages]
    gc.collect()
    gc.freeze()  # keeps memory pages shared between calls
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are not waited for
    wire.send(control, {"trouble": None})
    with socket.socket(fileno=control) as ends:
        while True:
            byte, calls, _, _ = socket.recv_fds(ends, 1, 2)
            if not byte:
                break
            if os.fork() == 0:
                try:
                    os.close(control)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    linux.prctl(linux.PR_SET_PDEATHSIG, 0)
                    supervisor.supervise(calls[0], calls[1] if len(calls) > 1 else None, backend)
                finally:
                    os._exit(0)
            for call in calls:
                os.close(call)
    with suppress(ChildProcessError):
        os.wait()  # for the supervisors, which end their jobs now; with SIGCHLD ignored: until no child is left
    if backend.isolation is not Isolation.NAMESPACES:
        remove(backend.folder)


def _enter(isolation: Isolation, request: dict[str, list[str]]) -> Backend:
    readable, packages, folder = tuple(request["readable"]), tuple(request["packages"]), str(request["folder"])
    if isolation is Isolation.NAMESPACES:
        proc = namespaces.enter(folder, readable)
    else:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    drop = isolation is Isolation.LANDLOCK and os.geteuid() == 0 and _nobody_can_use(os.__file__, folder)
    return Backend(isolation=isolation, readable=readable, packages=packages, folder=folder, proc=proc, as_nobody=drop)


def _nobody_can_use(python: str, folder: str) -> bool:
    """Whether the user nobody can read Python and reach the folder, tested in a child process."""
    pid = os.fork()
    if pid == 0:
        namespaces.as_nobody()
        usable = os.access(python, os.R_OK) and os.access(folder, os.X_OK)
        os._exit(0 if os.geteuid() != 0 and usable else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
