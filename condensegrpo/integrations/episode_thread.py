"""The thread of an episode whose environment blocks: code of others that was written without asyncio."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from condensegrpo.core.threads import DaemonThread, abandon

T = TypeVar("T")


class EpisodeThread:
    """Makes the blocking calls of one episode in one thread, in order, while the event loop plays other episodes.

    One thread for all calls, since libraries such as sqlite3 refuse calls from a second thread.
    """

    def __init__(self, name: str) -> None:
        """Start the thread; ``name``: of the environment."""
        self._name = name
        self._worker = DaemonThread(name)

    async def call(self, function: Callable[..., T], *arguments: object, **named: object) -> T:
        """What a call returns or raises. A cancellation raises an exception in the thread, see ``abandon``."""

        def called() -> T:
            try:
                return function(*arguments, **named)
            except StopIteration as error:  # which no coroutine may raise
                raise RuntimeError(f"it raised StopIteration{error.args or ''}") from error

        try:
            return await asyncio.wrap_future(self._worker.submit(called))
        except asyncio.CancelledError:
            abandon(self._worker.thread, self._name)
            raise

    async def close(self, last: Callable[[], object] | None = None) -> None:
        """Make a last call, if there is one, and let the thread end after its calls."""
        try:
            if last is not None:
                await self.call(last)
        finally:
            self._worker.close()
