"""Daemon threads, and calls in them of code that may never return. Standard library only.

``concurrent.futures.ThreadPoolExecutor``, which ``asyncio.to_thread`` uses, keeps the process alive until every call
ends. A thread cannot be stopped: a call that exceeds its time limit goes on until it returns, or until the process
ends.
"""

import ast
import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import TypeVar

from condensegrpo.core.failures import PluginFailure, failure_of, location_of
from condensegrpo.core.wording import plural

T = TypeVar("T")


class DaemonThread:
    """Makes calls in a thread, one after another, in the order in which they were submitted.

        worker = DaemonThread("checkpoint")
        future = worker.submit(write)       # returns at once
        worker.close()                      # the thread ends after the submitted calls
        future.result()                     # what write returned, or the exception that it raised

    A call whose future was cancelled before its turn is skipped. A call that raises does not affect the next one.
    """

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._closed = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def waiting(self) -> int:
        """Calls that were submitted and have not begun."""
        return max(0, self._calls.qsize() - self._closed)

    @property
    def location(self) -> str:
        """Where the thread is in a plug-in, see ``location_of``."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return "" if frame is None else location_of(traceback.walk_stack(frame))

    @property
    def stack(self) -> str:
        """Where the thread is, as a traceback shows it."""
        return "".join(traceback.format_stack(sys._current_frames().get(self.thread.ident or 0)))

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Make a call after those that wait; returns at once. The future holds any exception, also ``SystemExit``."""
        if self._closed:
            raise RuntimeError(f"submitting a call: the thread {self.thread.name!r} was closed")
        future: Future[T] = Future()
        self._calls.put(partial(_complete, future, call))
        return future

    def close(self) -> None:
        """Let the thread end after the submitted calls. Does not wait; see ``join``. May be called twice."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the end of a closed thread, at most so long; returns whether it ended."""
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # else it would stay in memory until the next one


def _complete(future: Future[T], call: Callable[[], T]) -> None:
    """Make a call and set its future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # raised by ``future.result()``
        if isinstance(error, StopIteration):  # which asyncio cannot pass on
            error = RuntimeError(f"it raised StopIteration{error.args or ''}").with_traceback(error.__traceback__)
        future.set_exception(error)
        del future, error  # the error's traceback refers to this frame
    else:
        future.set_result(result)


_idle: list[DaemonThread] = []  # of ``to_thread``
os.register_at_fork(after_in_child=_idle.clear)  # a fork has no other thread


async def to_thread(call: Callable[[], T]) -> T:
    """As ``asyncio.to_thread``, in a daemon thread. The message of a cancellation is where the call is then."""
    thread = _idle.pop() if _idle else DaemonThread("plug-ins")
    try:
        result = await asyncio.wrap_future(thread.submit(call))
    except asyncio.CancelledError:
        thread.close()
        raise asyncio.CancelledError(thread.location) from None
    except BaseException:
        _idle.append(thread)
        raise
    _idle.append(thread)
    return result


def result_in_thread(call: Callable[[], T], *, name: str, seconds: float) -> T | PluginFailure:
    """The result of a call, or why there is none: it raised or exceeded its time limit.

    Args:
        name: of the plug-in, for the thread and the failure: ``the reward Brief``.
    """
    worker = DaemonThread(name)
    outcome = worker.submit(call)
    worker.close()
    if not wait([outcome], timeout=seconds).done:
        return late(name, seconds, location=worker.location)
    error = outcome.exception()
    return outcome.result() if error is None else failure_of(name, error, plugin=call)


def late(source: str, seconds: float, setting: str = "", location: str = "") -> PluginFailure:
    """The failure of a call that exceeded its time limit."""
    message = f"no result within {plural(seconds, 'second')}{setting and f' ({setting})'}"
    return PluginFailure(source=source, error="", message=message, location=location)


# ``ast.parse`` counts its depth in one place for all threads (CPython 3.11, issue 106905): two at once may fail with
# ``SystemError: AST constructor recursion depth mismatch``
_parser = Lock()


def parsed(source: str) -> ast.Module:
    """The syntax tree of a program, as ``ast.parse`` gives and refuses it."""
    with _parser:
        return ast.parse(source)


def parsed_expression(source: str) -> ast.Expression:
    """The syntax tree of an expression, as ``ast.parse`` gives and refuses it."""
    with _parser:
        return ast.parse(source, mode="eval")
