"""A call of code that may never return, in a daemon thread with a time limit. Standard library only.

A thread cannot be stopped. An abandoned one gets an exception, which ends Python code at its next instruction; a call
that blocks outside of Python ends when that call returns, or with the process. Code that keeps the interpreter's lock,
such as a single search of a regular expression, stops every thread of the process: no time limit can end it.
"""

import asyncio
import contextlib
import ctypes
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from condensegrpo.core.daemon_thread import DaemonThread
from condensegrpo.core.failures import Failure, failure_of, location_of
from condensegrpo.core.wording import counted

T = TypeVar("T")
ABANDONED = "abandoned: "  # how the names of abandoned threads begin
MAX_ABANDONED = 64  # abandoned calls that may be running; beyond that no further call is started


class _Stopped(SystemExit):
    """Raised inside an abandoned thread."""


def result_in_thread(call: Callable[[], T], *, name: str, seconds: float, setting: str = "") -> T | Failure:
    """The result of a call, or why there is none: it raised, exceeded its time limit, or was not started.

    Args:
        name: of the plug-in, for the thread and the failure: ``the reward Brief``.
        setting: the configuration key of the time limit, for the failure; empty: there is none.
    """
    started = _started(call, name)
    if isinstance(started, Failure):
        return started
    with contextlib.suppress(TimeoutError):
        return started.outcome.result(seconds)
    return started.abandoned(seconds, setting)


async def awaited_in_thread(call: Callable[[], T], *, name: str, seconds: float, setting: str = "") -> T | Failure:
    """As ``result_in_thread``, on an event loop. A cancellation abandons the call."""
    started = _started(call, name)
    if isinstance(started, Failure):
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
    outcome: "Future[T | Failure]"

    def abandoned(self, seconds: float, setting: str) -> Failure:
        """Leave the call to itself; where it is now is the location of the failure."""
        message = f"no result within {counted(seconds, 'second')}{setting and f' ({setting})'}, abandoned"
        return Failure(source=self.name, error="", message=message, location=abandon(self.thread, self.name))


def _started(call: Callable[[], T], name: str) -> "_Call[T] | Failure":
    refused = too_many_abandoned()
    if refused:
        return Failure(source=name, error="", message=refused)
    worker = DaemonThread(name)
    outcome = worker.submit(partial(_result_or_failure, call, name))
    worker.close()
    return _Call(name, worker.thread, outcome)


def _result_or_failure(call: Callable[[], T], name: str) -> T | Failure:
    try:
        return call()
    except BaseException as error:  # the boundary to a plug-in; nothing else would report it in this thread
        return failure_of(name, error, plugin=call)
