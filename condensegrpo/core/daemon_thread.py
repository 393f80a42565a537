"""A daemon thread that makes calls in order and hands back what they return or raise. Standard library only.

``concurrent.futures.ThreadPoolExecutor`` does the same in threads that keep the process alive until every call ends.
This one is for calls that may block for ever, or that the end of the process may cut off.

``os._exit`` in such a call raises ``SystemExit``, since code of a plug-in would end the process without a message. In a
fork of the process, and in any other thread, it exits as ever.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import NoReturn, TypeVar

T = TypeVar("T")
CHECKS = 20  # of a call within its time limit


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
        """Make a call after those that wait; returns at once. The future holds any exception, also ``SystemExit``.

        Raises:
            RuntimeError: the thread was closed.
        """
        future: Future[T] = Future()
        self._put(partial(_complete, future, call))
        return future

    def outcome(self, call: Callable[[], T], seconds: float) -> tuple[T, None] | tuple[None, BaseException]:
        """What a call returns or raises, made after those that wait: for two thirds of the cost of a future.

        The time limit is counted in checks, since a process that was stopped has not exceeded it.

        Raises:
            TimeoutError: it does neither in time; it goes on.
            RuntimeError: the thread was closed.
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
