"""An event loop in a daemon thread, for coroutines that outlive a single ``asyncio.run``. Standard library only.

Plug-ins run on the loop. A watchdog reports what blocks it, since nothing can interrupt a thread.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar
from weakref import WeakSet

from condensegrpo.core.errors import RolloutError
from condensegrpo.core.threads import DaemonThread
from condensegrpo.core.wording import plural

T = TypeVar("T")
CLOSE_SECONDS = 60.0  # that ``close`` waits for the thread: a coroutine may block the loop for ever
PLUGIN_SECONDS = 2.0  # the same where plug-ins run on the loop: one may ignore its cancellation
SIGNAL_SECONDS = 0.2  # between looks for a signal while a thread waits
GIVE_UP_AFTER = 5  # times the seconds of a watchdog, after which it gives up
BEAT_SECONDS = 1.0  # between two looks of a watchdog


@dataclass(frozen=True, slots=True)
class Watch:
    """How long the plug-ins on a loop may block it, and who learns what blocks it."""

    seconds: float  # rollout.limits.turn_seconds
    report: Callable[[str], None]  # called in the thread of the watchdog


class BackgroundLoop:
    """Runs coroutines on its own event loop, on behalf of other threads and other event loops.

    with BackgroundLoop("rollout") as loop:
        future = loop.submit(work())        # starts at once
        loop.run(other())                   # waits in this thread
        await loop.call(other())            # waits in another event loop
        future.result()                     # the result of work(), or the exception that it raised
    """

    def __init__(self, name: str, *, close_seconds: float = CLOSE_SECONDS, watch: Watch | None = None) -> None:
        """Start the thread.

        Args:
            name: of the thread.
            close_seconds: longest wait of ``close``. A thread that is still blocked then is abandoned; it is a daemon
                and does not keep the process alive.
            watch: report what blocks the loop, and fail what runs on it with that report if it stays blocked for
                ``GIVE_UP_AFTER`` times as long.
        """
        self._close_seconds = close_seconds
        self._running = WeakSet[Future[Any]]()
        self._blocked: RolloutError | None = None
        self._closing = asyncio.Event()
        self._closed = False
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._name = name
        self._thread = DaemonThread(name)
        self._thread.submit(partial(self._run, started))
        self._thread.close()
        self._loop = started.result()
        if watch is not None:
            threading.Thread(target=self._watch, args=(watch,), name="watchdog", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Start ``work`` and return at once. Cancelling the future cancels the work."""
        if self._closed:
            work.close()
            raise RuntimeError(f"starting a coroutine: the background loop {self._name!r} was closed")
        if self._blocked is not None:
            work.close()
            raise self._blocked
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._running.add(future)
        return future

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Wait for the result of ``work`` in a thread without an event loop. Ctrl-C cancels the work."""
        future = self.submit(work)
        try:
            while not future.done():  # a signal that another thread gets does not end the wait of this one
                wait([future], timeout=SIGNAL_SECONDS)
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def call(self, work: Coroutine[object, object, T]) -> T:
        """Await the result of ``work`` from another event loop. Cancelling the caller cancels the work."""
        return await asyncio.wrap_future(self.submit(work))

    def finish(self, work: Coroutine[object, object, object]) -> None:
        """Close the loop after ``work``, unless it is closed. The garbage collector may call it in any thread, where it
        does not wait.
        """
        if self._closed:
            work.close()
            return
        if threading.current_thread() is not threading.main_thread():
            self.submit(work)
            return
        self.run(work)
        self.close()

    def close(self) -> None:
        """Cancel all running coroutines and end the thread. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(self._close_seconds)

    def _run(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        """Run the loop until it is closed. asyncio leaves it at a SystemExit or KeyboardInterrupt of any coroutine,
        whose future holds that error too: only its caller must end of it.
        """
        with asyncio.Runner() as runner:
            serving = runner.get_loop().create_task(self._serve(started))
            while not serving.done():
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    runner.get_loop().run_until_complete(serving)

    async def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        """Keep the loop running. After the return ``asyncio.Runner`` cancels the remaining tasks and waits for them."""
        started.set_result(asyncio.get_running_loop())
        await self._closing.wait()

    def _blocked_message(self, seconds: float) -> str:
        where = f" by {self._thread.location}" if self._thread.location else ""
        return f"the event loop {self._name!r} has been blocked{where} for {plural(round(seconds, 1), 'second')}."

    def _watch(self, watch: Watch) -> None:
        """Look for a sign of life of the loop again and again, until it is closed or blocked for too long.

        The seconds are counted in looks, since a process that was stopped did not block.
        """
        beat, blocked, reported, every = threading.Event(), 0.0, False, min(watch.seconds / 4, BEAT_SECONDS)
        while not self._closed:
            beat.clear()
            with contextlib.suppress(RuntimeError):  # it is closed now
                self._loop.call_soon_threadsafe(beat.set)
            while not beat.wait(every) and not self._closed:
                blocked += every
                if blocked >= watch.seconds and not reported:
                    watch.report(f"{self._blocked_message(blocked)}\n{self._thread.stack}")
                    reported = True
                if blocked >= GIVE_UP_AFTER * watch.seconds:
                    self._blocked = RolloutError(
                        f"{self._blocked_message(blocked)} Put blocking code into asyncio.to_thread, or raise "
                        f"rollout.limits.turn_seconds."
                    )
                    for future in list(self._running):
                        if not future.done():
                            future.set_exception(self._blocked)
                    return
            blocked, reported = 0.0, False
            time.sleep(every)
