"""An event loop in a daemon thread, for coroutines that outlive a single ``asyncio.run``. Standard library only."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any, Self, TypeVar

from condensegrpo.core.errors import RolloutError
from condensegrpo.core.thread_call import place_in_thread, raise_in_thread

T = TypeVar("T")
CLOSE_SECONDS = 60.0  # that ``close`` waits for the thread: a coroutine may block the loop for ever
PLUGIN_SECONDS = 2.0  # the same where plug-ins run on the loop: one may ignore its cancellation
LEAST_BLOCKED_SECONDS = 60.0  # that the loop of episodes may be blocked: it may render many prompts in a row
CHECKS = 20  # of the loop within the seconds that it may be blocked
GRACE = 4  # further checks, for blocking code to end


class Blocked(SystemExit):
    """Raised in code that blocks the event loop."""

    def __str__(self) -> str:
        """What happened and what to do."""
        return "it blocked the event loop on which all episodes run; put blocking code into asyncio.to_thread"


class BackgroundLoop:
    """Runs coroutines on its own event loop, on behalf of other threads and other event loops.

    with BackgroundLoop("rollout") as loop:
        future = loop.submit(work())        # starts at once
        loop.run(other())                   # waits in this thread
        await loop.call(other())            # waits in another event loop
        future.result()                     # the result of work(), or the exception that it raised
    """

    def __init__(
        self, name: str, *, close_seconds: float = CLOSE_SECONDS, blocked_seconds: float | None = None
    ) -> None:
        """Start the thread.

        Args:
            name: of the thread.
            close_seconds: longest wait of ``close``. A thread that is still blocked then is abandoned; it is a daemon
                and does not keep the process alive.
            blocked_seconds: after which code that blocks the loop gets ``Blocked``. If it blocks on, outside of Python,
                all work that was submitted fails with a ``RolloutError``. None: it may block for ever.
        """
        self._close_seconds = close_seconds
        self._futures: set[Future[Any]] = set()
        self._closing = asyncio.Event()
        self._closed = False
        self._ended = threading.Event()
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=name, daemon=True)
        self._thread.start()
        self._loop = started.result()
        if blocked_seconds is not None:
            watch = threading.Thread(target=self._watch, args=(blocked_seconds,), name=f"{name} watch", daemon=True)
            watch.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Start ``work`` and return at once. Cancelling the future cancels the work.

        Raises:
            RuntimeError: the loop was closed.
        """
        if self._closed:
            work.close()
            raise RuntimeError(f"starting a coroutine: the background loop {self._thread.name!r} was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Wait for the result of ``work`` in a thread without an event loop. Ctrl-C cancels the work."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def call(self, work: Coroutine[object, object, T]) -> T:
        """Await the result of ``work`` from another event loop. Cancelling the caller cancels the work."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        """Cancel all running coroutines and end the thread. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._ended.set()
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

    def _watch(self, seconds: float) -> None:
        """Check that the loop turns. Counted in checks and not in time: a stopped process does not block its loop."""
        alive, missed = threading.Event(), 0
        alive.set()
        while not self._ended.wait(seconds / CHECKS):
            missed = 0 if alive.is_set() else missed + 1
            if missed == 0:
                alive.clear()
                with contextlib.suppress(RuntimeError):  # the loop has just closed
                    self._loop.call_soon_threadsafe(alive.set)
            elif missed == CHECKS:
                raise_in_thread(self._thread, Blocked)
            elif missed == CHECKS + GRACE:
                self._fail(seconds)

    def _fail(self, seconds: float) -> None:
        """Let all submitted work fail, since the loop is lost."""
        error = RolloutError(
            f"running the episodes: code at {place_in_thread(self._thread) or 'an unknown place'} has blocked their "
            f"event loop for more than {seconds:g} seconds (rollout.limits.turn_seconds). Put blocking code into "
            f"asyncio.to_thread, with a time limit of its own."
        )
        for future in tuple(self._futures):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)


def episode_loop(name: str, turn_seconds: float) -> BackgroundLoop:
    """A loop for episodes, on which plug-ins run: it waits for none of them, and none may block it for long."""
    blocked_seconds = max(LEAST_BLOCKED_SECONDS, turn_seconds)
    return BackgroundLoop(name, close_seconds=PLUGIN_SECONDS, blocked_seconds=blocked_seconds)
