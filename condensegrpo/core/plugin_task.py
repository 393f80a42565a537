"""Tasks of plug-ins on an event loop that none of them can hold up for ever. Standard library only.

The code of a coroutine runs in parts, from one ``await`` that waits to the next. Each part of a plug-in's task runs in
a worker thread while the thread of the event loop waits for it, so that everything happens in the same order as without
a second thread. A part that exceeds its time limit is abandoned with its thread: its task ends with ``Blocked``, and
the loop goes on with a new worker.

    loop    ──┐        ┌── other tasks ──┐        ┌──
    worker    └─ part ─┘                 └─ part ─┘

Callbacks (``loop.call_soon``, ``Future.add_done_callback``) run in the thread of the loop, without a limit.
"""

import asyncio
import contextlib
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from condensegrpo.core.thread_call import abandon, too_many_abandoned
from condensegrpo.core.wording import counted

T = TypeVar("T")
CHECKS = 20  # of a part within its seconds. Counted in checks, since a stopped process is not a part that hangs
LEAST_SECONDS = 1.0  # that a part has, whatever its limit: a busy machine may stall a thread for that long


class Blocked(Exception):
    """A part of a plug-in's task exceeded its time limit, or was not begun."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message, place)
        self.message = message
        self.place = place  # file:line of the plug-in's code

    def __str__(self) -> str:
        """The message, with the place if it is known."""
        return f"{self.message} ({self.place})" if self.place else self.message


def plugin_task(work: Coroutine[Any, Any, T], *, name: str, seconds: float) -> asyncio.Task[T]:
    """Start a coroutine of a plug-in as a task, like ``asyncio.create_task``. Tasks that it creates are run likewise.

    Args:
        name: of the plug-in: ``the environment``.
        seconds: that each part may take, at least one. After an abandoned part it is half of that, and so on,
            until a task of that name ends by itself.
    """
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_create)  # type: ignore[arg-type]  # typeshed still has generators as coroutines
    context = copy_context()
    context.run(_limits.set, _Limit(name, seconds, _workers_of(loop)))
    return context.run(_create, loop, work)


async def wait_for_task(task: asyncio.Task[Any], seconds: float | None) -> bool:
    """Whether a task ends within its time limit, not counting what abandoned parts of other tasks took of that time.

    Unlike ``asyncio.wait_for``, it does not wait for a task that ignores its cancellation.
    """
    ended = asyncio.get_running_loop().create_future()

    def wake(_: object = None) -> None:
        if not ended.done():
            ended.set_result(None)

    timer = None if seconds is None else _Timer(seconds, wake)
    task.add_done_callback(wake)
    try:
        await ended
    finally:
        task.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()
    return task.done()


class _Timer:
    """Calls a function once after some seconds, not counting what abandoned parts took of that time."""

    def __init__(self, seconds: float, call: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._call = call
        self._workers = _workers_of(self._loop)
        self._lost = self._workers.lost
        self._handle = self._loop.call_later(seconds, self._due)

    def cancel(self) -> None:
        """Do not call it."""
        self._handle.cancel()

    def _due(self) -> None:
        more, self._lost = self._workers.lost - self._lost, self._workers.lost
        if more:
            self._handle = self._loop.call_later(more, self._due)
        else:
            self._call()


def _create(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, T],
    *,
    name: str | None = None,
    context: Context | None = None,
    **_: object,  # of later versions of Python
) -> asyncio.Task[T]:
    """The task factory of loops with plug-ins."""
    limit = _limits.get()
    if limit is None:
        return asyncio.Task(work, loop=loop, name=name, context=context)
    parts = _WatchedCoroutine(work, limit, loop, copy_context() if context is None else context)
    return asyncio.Task(parts, loop=loop, name=name)


def _workers_of(loop: asyncio.AbstractEventLoop) -> "_Workers":
    if loop not in _workers:
        _workers[loop] = _Workers()
        weakref.finalize(loop, _workers[loop].end)
    return _workers[loop]


class _Worker:
    """A thread that runs the parts of the tasks of one event loop, one at a time."""

    def __init__(self) -> None:
        self._calls = SimpleQueue[Callable[[], Any] | None]()
        self._outcomes = SimpleQueue[tuple[Any, BaseException | None]]()
        self.thread = threading.Thread(target=self._run, name="plug-ins", daemon=True)
        self.thread.start()

    def outcome(self, call: Callable[[], Any], seconds: float) -> tuple[Any, BaseException | None]:
        """What the call returned or raised.

        Raises:
            Empty: it did neither in time.
        """
        self._calls.put(call)
        for _ in range(CHECKS - 1):
            with contextlib.suppress(Empty):
                return self._outcomes.get(timeout=seconds / CHECKS)
        return self._outcomes.get(timeout=seconds / CHECKS)

    def end(self) -> None:
        """End the thread after its call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._outcomes.put((call(), None))
            except BaseException as error:  # raised anew in the thread of the loop, see ``_WatchedCoroutine``
                self._outcomes.put((None, error))
            del call


@dataclass(eq=False)
class _Workers:
    """The workers of an event loop: one, unless a part runs the loop itself."""

    idle: list[_Worker] = field(default_factory=list)
    lost: float = 0.0  # seconds for which abandoned parts held up the loop
    strikes: Counter[str] = field(default_factory=Counter)  # abandoned parts since a task ended, by plug-in

    def run(self, call: Callable[[], Any], limit: "_Limit") -> tuple[Any, BaseException | None]:
        """What a call returned or raised.

        Raises:
            Blocked: it did neither within its limit.
        """
        if not self.idle and (refused := too_many_abandoned()):
            raise Blocked(refused)
        worker = self.idle.pop() if self.idle else _Worker()
        seconds = max(limit.seconds / 2 ** min(self.strikes[limit.name], 30), LEAST_SECONDS)
        try:
            outcome = worker.outcome(call, seconds)
        except BaseException as error:  # no result in time, or Ctrl-C in the thread of the loop
            place = abandon(worker.thread, limit.name)
            worker.end()
            if not isinstance(error, Empty):
                raise
            self.lost += seconds
            self.strikes[limit.name] += 1
            raise Blocked(
                f"it held up the event loop for more than {counted(seconds, 'second')}, and was abandoned; put "
                f"blocking code into asyncio.to_thread",
                place,
            ) from None
        if outcome[1] is not None:  # the task has ended
            self.strikes.pop(limit.name, None)
        self.idle.append(worker)
        return outcome

    def end(self) -> None:
        """End the threads."""
        for worker in self.idle:
            worker.end()


@dataclass(frozen=True, slots=True)
class _Limit:
    name: str  # of the plug-in
    seconds: float  # of a part
    workers: _Workers


class _WatchedCoroutine(Coroutine[Any, Any, T]):
    """A coroutine that a worker resumes, in a context that its task does not enter."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, T], limit: _Limit, loop: asyncio.AbstractEventLoop, context: Context
    ) -> None:
        self._coroutine = coroutine
        self._limit = limit
        self._loop = loop
        self._context = context
        self._hooks = sys.get_asyncgen_hooks()

    def send(self, value: object) -> object:
        """Run the next part."""
        return self._result(partial(self._coroutine.send, value))

    def throw(self, *error: Any) -> object:  # noqa: ANN401  the older signature has a type, a value and a traceback
        """Run the next part, with an error at its beginning."""
        return self._result(partial(self._coroutine.throw, *error))

    def close(self) -> None:
        """Run the last part."""
        self._result(self._coroutine.close)

    def __await__(self) -> Generator[Any, Any, T]:
        """Of the coroutine itself: only a task runs it in a worker."""
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> object:
        """Of the coroutine: libraries read the ``cr_frame`` and ``cr_running`` of a task's coroutine."""
        return getattr(self._coroutine, name)

    def _result(self, resume: Callable[[], object]) -> object:
        part = partial(self._part, resume, asyncio.current_task(self._loop))
        debug = self._loop.get_debug()
        if debug:  # it would refuse calls of a second thread
            self._loop.set_debug(False)
        try:
            result, error = self._limit.workers.run(part, self._limit)
        finally:
            if debug:
                self._loop.set_debug(True)
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def _part(self, resume: Callable[[], object], task: asyncio.Task[Any] | None) -> object:
        """Run a part in a worker as in the thread of the loop."""
        asyncio._set_running_loop(self._loop)
        sys.set_asyncgen_hooks(*self._hooks)
        enters = None if asyncio.current_task() is task else task  # since Python 3.14 each thread has a current task
        try:
            if enters is not None:
                asyncio._enter_task(self._loop, enters)
            return self._context.run(resume)
        finally:
            if enters is not None:
                asyncio._leave_task(self._loop, enters)
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(None, None)


_limits: ContextVar[_Limit | None] = ContextVar("limit of a plug-in's parts", default=None)
_workers = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Workers]()
