"""Asynchronous code of plug-ins: tasks of an event loop that none of them can block for ever. Standard library only.

An event loop runs a task in steps, from one ``await`` that suspends it to the next. A step of a plug-in's task runs in
a worker thread while the thread of the event loop waits for it, so that everything happens in the same order as without
a second thread. A step that exceeds its time limit is abandoned with its thread: its task ends with ``Blocked``, and
the loop goes on with a new worker.

    loop    ──┐        ┌── other tasks ──┐        ┌──
    worker    └─ step ─┘                 └─ step ─┘

A worker shows the plug-in the same running loop and current task as the thread of the loop, through hooks that asyncio
exports for event loops and task classes of others (https://docs.python.org/3/library/asyncio-extending.html). Ordinary
calls cannot replace them. A step that waits outside of Python cannot be interrupted, so it must not run in the thread
of the loop. Nor can another thread continue the loop meanwhile: the step is still its current task. A second loop for
plug-ins would have the same fault for every plug-in that waits on it, and would call them in an order that varies.

Callbacks (``loop.call_soon``, ``Future.add_done_callback``) run in the thread of the loop, without a limit.
"""

import asyncio
import inspect
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from condensegrpo.core.failures import PluginFailure, location_of
from condensegrpo.core.threads import DaemonThread, abandon, too_many_abandoned
from condensegrpo.core.wording import plural

T = TypeVar("T")
RunStep = Callable[[Callable[[], object]], object]
Hooks = tuple[Any, Any]  # of asynchronous generators, see ``sys.set_asyncgen_hooks``
MIN_SECONDS = 1.0  # limit of a step, whatever is configured: a busy machine may stall a thread for that long


class Blocked(Exception):
    """A step of a plug-in's task exceeded its time limit, or was not started."""

    def __init__(self, message: str, location: str = "") -> None:
        super().__init__(message, location)
        self.message = message
        self.location = location  # file:line of the plug-in's code

    def __str__(self) -> str:
        """The message, with the location if it is known."""
        return f"{self.message} ({self.location})" if self.location else self.message


async def result_of_task(
    work: Coroutine[Any, Any, T], *, name: str, step_seconds: float, seconds: float | None, setting: str = ""
) -> T | PluginFailure:
    """The result of a coroutine of a plug-in, or why there is none: time limit exceeded, loop blocked, cancelled.

    It runs in a task of its own: if it ignores its cancellation it is abandoned, and if it raises ``CancelledError`` or
    cancels its task, only the work ends. What it raises otherwise is raised; a cancellation of the caller cancels it.

    Args:
        name: of the plug-in, for the failure: ``the environment``.
        step_seconds: for which the work may block the event loop, see ``plugin_task``.
        seconds: for all of the work; None: no limit.
        setting: the configuration key of that limit, for the failure; empty: there is none.
    """
    task = start_plugin_task(work, name=name, seconds=step_seconds)
    try:
        if not await wait_for_task(task, seconds) and seconds is not None:
            message = f"no result within {plural(seconds, 'second')}{setting and f' ({setting})'}"
            return PluginFailure(source=name, error="", message=message, location=location_of(_suspended(work)))
        if task.cancelled():
            return PluginFailure(source=name, error="CancelledError", message="it cancelled itself")
        return task.result()
    except Blocked as blocked:
        return PluginFailure(source=name, error="", message=blocked.message, location=blocked.location)
    finally:
        if task.cancel():
            task.add_done_callback(_retrieve)
        else:
            _retrieve(task)


def start_plugin_task(work: Coroutine[Any, Any, T], *, name: str, seconds: float) -> asyncio.Task[T]:
    """Start a coroutine of a plug-in as a task, like ``asyncio.create_task``. Tasks that it creates are run likewise.

    Args:
        name: of the plug-in: ``the environment``.
        seconds: that each step may take, at least one. After an abandoned step it is half of that, and so on,
            until a task of that name ends by itself.
    """
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_create_task)  # type: ignore[arg-type]  # typeshed still has generators as coroutines
    context = copy_context()
    context.run(_limit.set, _Limit(name, seconds, _workers_of(loop)))
    return context.run(_create_task, loop, work, context=context)


async def wait_for_task(task: asyncio.Task[Any], seconds: float | None) -> bool:
    """Whether a task ends within its time limit, not counting what abandoned steps of other tasks took of that time.

    Unlike ``asyncio.wait_for``, it does not wait for a task that ignores its cancellation.
    """
    loop = task.get_loop()
    workers = _workers_of(loop)
    lost, deadline = workers.lost, None if seconds is None else loop.time() + seconds
    await asyncio.sleep(0)  # most tasks end in their first step, and need neither a timer nor a callback
    while not task.done():
        await asyncio.wait([task], timeout=None if deadline is None else max(0.0, deadline - loop.time()))
        if deadline is None or workers.lost == lost:
            break
        deadline, lost = deadline + workers.lost - lost, workers.lost
    return task.done()


def _create_task(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, T],
    *,
    name: str | None = None,
    context: Context | None = None,
    **_: object,  # of later versions of Python
) -> asyncio.Task[T]:
    """The task factory of loops with plug-ins."""
    limit = _limit.get()
    if limit is None:
        return asyncio.Task(work, loop=loop, name=name, context=context)
    inside = copy_context() if context is None else context
    steps = _in_steps(work, partial(_run_step, limit, loop, inside, sys.get_asyncgen_hooks()))
    steps.send(None)  # up to the ``yield`` before the first step
    return asyncio.Task(steps, loop=loop, name=name)


async def _in_steps(work: Coroutine[Any, Any, T], run: RunStep) -> T:
    """As ``await work``, with each step made by ``run``."""
    return await _steps(work, run)


@types.coroutine
def _steps(work: Coroutine[Any, Any, T], run: RunStep) -> Generator[Any, Any, T]:
    """The awaitable of ``_in_steps``. It yields once before the first step, so that a cancellation that comes before
    that step still reaches ``work``.
    """
    awaited = None
    while True:
        try:
            resume = partial(work.send, (yield awaited))
        except GeneratorExit:  # never completed, and collected
            work.close()
            raise
        except BaseException as error:  # of what was awaited, or a cancellation: raised inside ``work``
            resume = partial(work.throw, error)
        try:
            awaited = run(resume)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # typeshed has it as Any


def _run_step(
    limit: "_Limit", loop: asyncio.AbstractEventLoop, context: Context, hooks: Hooks, resume: Callable[[], object]
) -> object:
    """Run a step in a worker, and wait for it in the thread of the loop."""
    step = partial(_step, loop, asyncio.current_task(loop), context, hooks, resume)
    if not loop.get_debug():
        return limit.workers.run(step, limit)
    loop.set_debug(False)  # it would refuse calls of a second thread
    try:
        return limit.workers.run(step, limit)
    finally:
        loop.set_debug(True)


def _step(
    loop: asyncio.AbstractEventLoop,
    task: asyncio.Task[Any] | None,
    context: Context,  # not the one that the task enters in the thread of the loop
    hooks: Hooks,
    resume: Callable[[], object],
) -> object:
    """Run a step, in a worker, as in the thread of the loop."""
    asyncio._set_running_loop(loop)
    sys.set_asyncgen_hooks(*hooks)
    enters = None if asyncio.current_task() is task else task  # since Python 3.14 each thread has a current task
    try:
        if enters is not None:
            asyncio._enter_task(loop, enters)
        return context.run(resume)
    finally:
        if enters is not None:
            asyncio._leave_task(loop, enters)
        asyncio._set_running_loop(None)
        sys.set_asyncgen_hooks(None, None)


@dataclass(eq=False)
class _Workers:
    """The threads for the steps on one event loop: one at a time, unless a step runs the loop itself."""

    idle: list[DaemonThread] = field(default_factory=list)
    lost: float = 0.0  # seconds for which abandoned steps blocked the loop
    strikes: Counter[str] = field(default_factory=Counter)  # abandoned steps since a task ended, by plug-in

    def run(self, step: Callable[[], object], limit: "_Limit") -> object:
        """What a step returns or raises."""
        if not self.idle and (refused := too_many_abandoned()):
            raise Blocked(refused)
        worker = self.idle.pop() if self.idle else DaemonThread("plug-ins")
        seconds = max(limit.seconds / 2 ** min(self.strikes[limit.name], 30), MIN_SECONDS)
        try:
            result, error = worker.outcome(step, seconds)
        except BaseException as interrupt:  # no outcome in time, or Ctrl-C in the thread of the loop
            location = abandon(worker.thread, limit.name)
            worker.close()
            if not isinstance(interrupt, TimeoutError):
                raise
            self.lost += seconds
            self.strikes[limit.name] += 1
            raise Blocked(
                f"it held up the event loop for more than {plural(seconds, 'second')}, and was abandoned; put "
                f"blocking code into asyncio.to_thread",
                location,
            ) from None
        self.idle.append(worker)
        if error is None:
            return result
        self.strikes.pop(limit.name, None)  # the task has ended
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def close(self) -> None:
        """End the threads."""
        for worker in self.idle:
            worker.close()


class _Limit(NamedTuple):
    name: str  # of the plug-in
    seconds: float  # of a step
    workers: _Workers


def _workers_of(loop: asyncio.AbstractEventLoop) -> _Workers:
    if loop not in _workers:
        _workers[loop] = _Workers()
        weakref.finalize(loop, _workers[loop].close)
    return _workers[loop]


def _suspended(waiting: object) -> Iterator[tuple[FrameType, int]]:
    """The frames in which a coroutine waits, the innermost first."""
    frames = list[FrameType]()
    while inspect.iscoroutine(waiting) and waiting.cr_frame is not None:
        frames.append(waiting.cr_frame)
        waiting = waiting.cr_await
    return ((frame, frame.f_lineno) for frame in reversed(frames))


def _retrieve(task: asyncio.Task[object]) -> None:
    """Retrieve the exception of abandoned work, which asyncio would log as never retrieved."""
    if not task.cancelled():
        task.exception()


_limit: ContextVar[_Limit | None] = ContextVar("limit of a plug-in's steps", default=None)
_workers = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Workers]()
