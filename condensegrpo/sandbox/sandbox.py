"""The sandbox: runs Python and commands that nobody vouches for, and says what came of it.

    with Sandbox() as sandbox:
        ran = await sandbox.run_python("print(6 * 7)")      # Ran(outcome="finished", stdout="42\\n", …)

Every call begins with nothing: a fresh interpreter, an empty folder, no environment, no network, no other processes.
A pool of threads waits for the calls, as many at a time as ``parallel``; further ones wait, and their limits begin when
they do.
"""

import asyncio
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from condensegrpo.core.errors import SandboxError
from condensegrpo.sandbox import ladder
from condensegrpo.sandbox.limits import SandboxLimits
from condensegrpo.sandbox.process import Call, Server
from condensegrpo.sandbox.ran import Ran
from condensegrpo.sandbox.setting import Rung

T = TypeVar("T")


class Ticket:
    """The calls of one piece of work, to be cancelled together."""

    def __init__(self, sandbox: "Sandbox") -> None:
        self._sandbox = sandbox
        self._calls: list[Call] = []
        self._lock = threading.Lock()
        self._cancelled = False

    def call(self, request: Mapping[str, Any], channel: socket.socket | None = None) -> Call:
        """Begin a call; with a channel it shares that with another one."""
        call = self._sandbox.running().call(channel)
        with self._lock:
            self._calls.append(call)
            if self._cancelled:
                call.cancel()
        call.ask(request)
        return call

    def cancel(self) -> None:
        """End the calls that have not ended, and those that are yet to begin."""
        with self._lock:
            self._cancelled = True
            for call in self._calls:
                call.cancel()


Work = Callable[[Ticket], T]  # what a thread of the pool does


class Sandbox:
    """Calls on the strongest rung that holds here, or on the one that was asked for.

    Its server process starts at the first call, or at ``open``, and ends with ``close``, with the ``with`` block, when
    nothing refers to the sandbox any more, or when the program exits. It may be used from any thread and any event
    loop.
    """

    def __init__(
        self,
        *,
        isolation: str = ladder.AUTO,
        limits: SandboxLimits | None = None,
        parallel: int | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        """Set it up; nothing is started yet.

        Args:
            isolation: ``auto``, or one of ``Rung``; ``none`` confines nothing.
            limits: of a call without limits of its own.
            parallel: calls at a time; by default two per core.
            packages: folders to read Python packages from, beside the standard library.
        """
        self.limits = limits or SandboxLimits()
        self._isolation = isolation
        self._packages = tuple(packages)
        self._server: Server | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._pool = ThreadPoolExecutor(parallel or 2 * len(os.sched_getaffinity(0)), "sandbox")

    def open(self) -> Rung:
        """Start the server if it is not running; the rung that it is on.

        Raises:
            SandboxError: no rung holds here, or the sandbox was closed.
        """
        return self.running().rung

    async def run_python(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        seconds: float | None = None,
        limits: SandboxLimits | None = None,
    ) -> Ran:
        """Run Python source as ``__main__`` in a folder with these files.

        Args:
            code: any text; what is no Python ends as Python would end.
            stdin: what it can read there.
            files: text by path within the folder.
            seconds: in place of the limit on time.
            limits: in place of the sandbox's.

        Raises:
            SandboxError: there is no sandbox to run it in.
        """
        request = {"kind": "python", "code": code, "stdin": stdin, "files": dict(files or {})}
        return await self.work(self._one(request, self.limits_of(limits, seconds)))

    def run_python_now(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        seconds: float | None = None,
        limits: SandboxLimits | None = None,
    ) -> Ran:
        """``run_python`` for callers without an event loop: it blocks."""
        request = {"kind": "python", "code": code, "stdin": stdin, "files": dict(files or {})}
        return self.work_now(self._one(request, self.limits_of(limits, seconds)))

    def limits_of(self, limits: SandboxLimits | None, seconds: float | None) -> SandboxLimits:
        """The limits of a call that asks for these."""
        wanted = limits or self.limits
        return wanted if seconds is None else replace(wanted, seconds=seconds)

    async def work(self, work: Work[T]) -> T:
        """Do some work on the pool. If the awaiting task is cancelled, the work's calls end."""
        ticket = Ticket(self)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, ticket)
        finally:
            ticket.cancel()

    def work_now(self, work: Work[T]) -> T:
        """Do some work on the pool and wait for it."""
        ticket = Ticket(self)
        try:
            return self._pool.submit(work, ticket).result()
        finally:
            ticket.cancel()

    def running(self) -> Server:
        """The server, started if there is none or it has ended.

        Raises:
            SandboxError: no rung holds here, or the sandbox was closed.
        """
        with self._lock:
            if self._closed:
                raise SandboxError("calling the sandbox: it was closed. Keep it open as long as code is to be run.")
            if self._server is not None and not self._server.alive():
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = ladder.open_server(self._isolation, self._packages)
                weakref.finalize(self, _close_in, os.getpid(), self._server)
            return self._server

    def close(self) -> None:
        """End the server and every call. May be called twice."""
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
        if server is not None:
            server.close()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _one(self, request: Mapping[str, Any], limits: SandboxLimits) -> Work[Ran]:
        return lambda ticket: ticket.call({**request, "limits": asdict(limits)}).result()


def _close_in(owner: int, server: Server) -> None:
    """Close a server, unless this process is a fork of its owner."""
    if os.getpid() == owner:
        server.close()
