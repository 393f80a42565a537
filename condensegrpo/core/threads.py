"""Daemon threads, and calls in them of code that may never return. Standard library only.

``concurrent.futures.ThreadPoolExecutor`` keeps the process alive until every call ends; a ``DaemonThread`` is for calls
that may block for ever, or that the end of the process may cut off. ``os._exit`` in such a call raises ``SystemExit``,
since code of a plug-in would end the process without a message. In a fork of the process, and in any other thread, it
exits as ever.

A thread cannot be stopped. An abandoned one gets an exception, which ends Python code at its next instruction; a call
that blocks outside of Python ends when that call returns, or with the process. Code that keeps the interpreter's lock,
such as a single search of a regular expression, stops every thread of the process: no time limit can end it.
"""

import ast
import asyncio
import contextlib
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Generic, NoReturn, TypeVar

from condensegrpo.core.failures import PluginFailure, failure_of, location_of
from condensegrpo.core.wording import plural

T = TypeVar("T")
CHECKS = 20  # of a call within its time limit
ABANDONED = "abandoned: "  # how the names of abandoned threads begin
MAX_ABANDONED = 64  # abandoned calls that may be running; beyond that no further call is started


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

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Make a call after those that wait; returns at once. The future holds any exception, also ``SystemExit``."""
        future: Future[T] = Future()
        self._put(partial(_complete, future, call))
        return future

    def outcome(self, call: Callable[[], T], seconds: float) -> tuple[T, None] | tuple[None, BaseException]:
        """What a call returns or raises, made after those that wait: for two thirds of the cost of a future.

        The time limit is counted in checks, since a process that was stopped has not exceeded it.
        """
        outcomes = SimpleQueue[tuple[T, None] | tuple[None, BaseException]]()
        self._put(partial(_answer, outcomes, call))
        for _ in range(CHECKS):
            try:
                return outcomes.get(timeout=seconds / CHECKS)
            except Empty:
                continue
        raise TimeoutError

    def close(self) -> None:
        """Let the thread end after the submitted calls. Does not wait; see ``join``. May be called twice."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the end of a closed thread, at most so long; returns whether it ended."""
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def _put(self, call: Callable[[], None]) -> None:
        if self._closed:
            raise RuntimeError(f"submitting a call: the thread {self.thread.name!r} was closed")
        self._calls.put(call)

    def _run(self) -> None:
        _thread.process = os.getpid()
        with contextlib.suppress(SystemExit):  # of ``thread_call.abandon``, before or after the call
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
        future.set_exception(error)
        del future  # the error's traceback refers to this frame
    else:
        future.set_result(result)


def _answer(outcomes: "SimpleQueue[tuple[T, None] | tuple[None, BaseException]]", call: Callable[[], T]) -> None:
    """Make a call and hand its outcome to the waiting thread."""
    try:
        outcomes.put((call(), None))
    except BaseException as error:  # raised there
        outcomes.put((None, error))


class _Thread(threading.local):
    process = 0  # that has this thread as a daemon thread


def _exit_unless_daemon(status: int) -> NoReturn:
    """``os._exit``."""
    if _thread.process == os.getpid():
        raise SystemExit(f"os._exit({status}) would end the process without a message. Raise an exception instead.")
    _exit(status)


_thread = _Thread()
_exit, os._exit = os._exit, _exit_unless_daemon


class _Stopped(SystemExit):
    """Raised inside an abandoned thread."""


def result_in_thread(call: Callable[[], T], *, name: str, seconds: float, setting: str = "") -> T | PluginFailure:
    """The result of a call, or why there is none: it raised, exceeded its time limit, or was not started.

    Args:
        name: of the plug-in, for the thread and the failure: ``the reward Brief``.
        setting: the configuration key of the time limit, for the failure; empty: there is none.
    """
    started = _started(call, name)
    if isinstance(started, PluginFailure):
        return started
    with contextlib.suppress(TimeoutError):
        return started.outcome.result(seconds)
    return started.abandoned(seconds, setting)


async def awaited_in_thread(
    call: Callable[[], T], *, name: str, seconds: float, setting: str = ""
) -> T | PluginFailure:
    """As ``result_in_thread``, on an event loop. A cancellation abandons the call."""
    started = _started(call, name)
    if isinstance(started, PluginFailure):
        return started
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(started.outcome)
    except TimeoutError:  # none of the call's: they are failures
        return started.abandoned(seconds, setting)
    except asyncio.CancelledError:
        started.abandoned(seconds, setting)
        raise


def abandon(thread: threading.Thread, name: str) -> str:
    """Leave a thread to itself, with an exception. Returns where it is in a plug-in, see ``location_of``."""
    frame = sys._current_frames().get(thread.ident or 0)
    location = location_of(traceback.walk_stack(frame)) if frame is not None else ""
    thread.name = f"{ABANDONED}{name}"
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stopped))
    return location


def too_many_abandoned() -> str:
    """Why no further call is started; empty: it may be."""
    running = sum(thread.name.startswith(ABANDONED) for thread in threading.enumerate())
    if running < MAX_ABANDONED:
        return ""
    return f"not called: {running} calls that exceeded their time limit are still running"


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    name: str
    thread: threading.Thread
    outcome: "Future[T | PluginFailure]"

    def abandoned(self, seconds: float, setting: str) -> PluginFailure:
        """Leave the call to itself; where it is now is the location of the failure."""
        message = f"no result within {plural(seconds, 'second')}{setting and f' ({setting})'}, abandoned"
        return PluginFailure(source=self.name, error="", message=message, location=abandon(self.thread, self.name))


def _started(call: Callable[[], T], name: str) -> "_Call[T] | PluginFailure":
    refused = too_many_abandoned()
    if refused:
        return PluginFailure(source=name, error="", message=refused)
    worker = DaemonThread(name)
    outcome = worker.submit(partial(_result_or_failure, call, name))
    worker.close()
    return _Call(name, worker.thread, outcome)


def _result_or_failure(call: Callable[[], T], name: str) -> T | PluginFailure:
    try:
        return call()
    except BaseException as error:  # the boundary to a plug-in; nothing else would report it in this thread
        return failure_of(name, error, plugin=call)


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
