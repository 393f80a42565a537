"""The sandbox: runs untrusted Python code and returns the result.

    with Sandbox() as sandbox:
        result = await sandbox.run_python("print(6 * 7)")      # CallResult(outcome="finished", stdout="42\\n", …)

Every call starts with a fresh interpreter, an empty folder, no environment, no network and no other processes. At most
``parallel`` calls run at a time, each waited for by a thread of a pool; the time limit of a call starts with the call.
"""

import asyncio
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Self, TypeVar

from condensegrpo.core.errors import SandboxError
from condensegrpo.sandbox.calls import CallResult, Isolation, SandboxLimits
from condensegrpo.sandbox.process import AUTO, Call, Server, open_server, python_request

T = TypeVar("T")


class CallGroup:
    """Calls that are cancelled together."""

    def __init__(self, sandbox: "Sandbox") -> None:
        self._sandbox = sandbox
        self._calls: list[Call] = []
        self._lock = threading.Lock()
        self._cancelled = False

    def call(self, request: Mapping[str, object], channel: socket.socket | None = None) -> Call:
        """Start a call, optionally with a channel that it shares with another call."""
        call = self._sandbox.running().call(channel)
        with self._lock:
            self._calls.append(call)
            if self._cancelled:
                call.cancel()
        call.send(request)
        return call

    def cancel(self) -> None:
        """End the running calls, and calls that are started later."""
        with self._lock:
            self._cancelled = True
            for call in self._calls:
                call.cancel()


Work = Callable[[CallGroup], T]  # a function that runs in a thread of the pool
_SANDBOXES: "weakref.WeakSet[Sandbox]" = weakref.WeakSet()  # of this process; a fork starts each anew


class Sandbox:
    """Runs code with one isolation backend; several sandboxes in a process are independent of each other.

    Its server process starts at the first call, or at ``open``, and ends with ``close``, with the ``with`` block, when
    nothing refers to the sandbox any more, or when the program exits. It may be used from any thread and any event
    loop, and in a forked process, where it starts a server of its own.
    """

    def __init__(
        self,
        *,
        isolation: str = AUTO,
        limits: SandboxLimits | None = None,
        parallel: int | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        """Set it up without starting anything.

        Args:
            isolation: ``auto`` (the strongest backend that works), or one of ``Isolation``; ``none`` confines nothing.
            limits: of every call; ``run_python`` may replace the time limit.
            parallel: calls at a time; by default two per core.
            packages: folders with importable Python packages, besides the standard library.
        """
        self.limits = limits or SandboxLimits()
        self._isolation = isolation
        self._packages = tuple(packages)
        self._parallel = parallel or 2 * len(os.sched_getaffinity(0))
        self._closed = False
        self._server: Server | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(self._parallel, "sandbox")
        _SANDBOXES.add(self)

    def open(self) -> Isolation:
        """Start the server if it is not running, and return its isolation backend.

        Raises:
            SandboxError: no isolation backend works on this machine, or the sandbox is closed.
        """
        return self.running().isolation

    async def run_python(
        self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None, seconds: float | None = None
    ) -> CallResult:
        """Run Python source as ``__main__`` in a folder with these files.

        Args:
            code: any text; a syntax error is reported as by the interpreter.
            stdin: text of its standard input.
            files: text by path relative to the folder.
            seconds: replaces the time limit of the sandbox.

        Raises:
            SandboxError: see ``open``.
        """
        with self._started(self._python(code, stdin, files, seconds)) as result:
            return await asyncio.wrap_future(result)

    def run_python_now(
        self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None, seconds: float | None = None
    ) -> CallResult:
        """``run_python`` for callers without an event loop: it blocks."""
        return self.work(self._python(code, stdin, files, seconds))

    def work(self, work: Work[T]) -> T:
        """Run a function in the pool and wait for its result."""
        with self._started(work) as result:
            return result.result()

    @contextmanager
    def _started(self, work: Work[T]) -> "Iterator[Future[T]]":
        """A function that runs in the pool. If its caller waits no longer, its calls end."""
        group = CallGroup(self)
        try:
            yield self._pool.submit(work, group)
        finally:
            group.cancel()

    def running(self) -> Server:
        """The server process, started if there is none or it has ended.

        Raises:
            SandboxError: see ``open``.
        """
        with self._lock:
            if self._closed:
                raise SandboxError("calling the sandbox: it was closed. Keep it open while code runs.")
            if self._server is not None and not self._server.alive():
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = open_server(self._isolation, self._packages)
                weakref.finalize(self, _close_in, os.getpid(), self._server)
            return self._server

    def close(self) -> None:
        """End the server process and every call. May be called twice."""
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
        if server is not None:
            server.close()
        self._pool.shutdown(cancel_futures=True)

    def forget(self) -> None:
        """Begin as if never used, in a forked process: threads and server remain with the process that forked."""
        if self._server is not None:
            self._server.forget()
        self._server = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(self._parallel, "sandbox")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _python(
        self, code: str, stdin: str, files: Mapping[str, str] | None, seconds: float | None
    ) -> Work[CallResult]:
        limits = self.limits if seconds is None else replace(self.limits, seconds=seconds)
        request = python_request(code, limits, stdin, files)
        return lambda group: group.call(request).result()


def _forget_all() -> None:
    for sandbox in list(_SANDBOXES):
        sandbox.forget()


os.register_at_fork(after_in_child=_forget_all)


def _close_in(owner: int, server: Server) -> None:
    """Close a server, unless this process is a fork of its owner."""
    if os.getpid() == owner:
        server.close()
