"""An event loop in virtual time: when no callback is ready, the clock jumps to the next timer.

Everything runs in the caller's thread: a future's ``result()`` runs the loop until the future is done. Between two such
calls no virtual time passes, so that computing takes none unless a stand-in charges it.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from condensegrpo.core.errors import RunError
from condensegrpo.core.thread_call import without_limits

T = TypeVar("T")
STALL_SECONDS = 60.0  # of real time, that a thread of a plug-in may take while no timer is set


class VirtualClock:
    """The event loop of a simulation, as ``core.background_loop.RunsCoroutines``.

    clock = VirtualClock()
    clock.run(asyncio.sleep(3600))      # returns at once
    clock.now                           # 3600.0
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=_VirtualLoop)
        self.loop = self._runner.get_loop()
        without_limits.add(self.loop)

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.loop.time()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``work``; it goes on whenever a result is waited for."""
        return _Driven(self.loop, work)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; everything that was submitted goes on meanwhile."""
        return self.submit(work).result()

    def close(self) -> None:
        """Cancel what still runs. May be called twice."""
        self._runner.close()


class _Driven(Future[T]):
    """The future of a coroutine, whose ``result`` runs the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        super().__init__()
        self._loop, self._task = loop, loop.create_task(work)
        self._task.add_done_callback(self._settle)

    def result(self, timeout: float | None = None) -> T:
        """The result, at whatever virtual time it is there."""
        del timeout  # of real seconds
        if not self.done():
            self._loop.run_until_complete(asyncio.wait([self._task]))
        return super().result()

    def _settle(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.cancel()
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is its selector's."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now


class _JumpingSelector(selectors.SelectSelector):
    """Moves the clock by the time that the loop would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready: of real files only where nothing else can happen."""
        if timeout is None:
            ready = super().select(STALL_SECONDS)
            if not ready:
                raise RunError(
                    f"simulating: at {self.now:.3f} virtual seconds everything waits and no timer is set. A plug-in of "
                    f"the configuration waits for something outside of the event loop."
                )
            return ready
        if timeout > 0:
            self.now += timeout
        return []
