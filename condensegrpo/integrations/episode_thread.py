"""The thread of an episode whose environment blocks: code of others that was written without asyncio."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from condensegrpo.core.threads import DaemonThread

T = TypeVar("T")


class EpisodeThread:
    """Makes the blocking calls of one episode in one thread, in order, while the event loop plays other episodes.

    One thread for all calls, since libraries such as sqlite3 refuse calls from a second thread.
    """

    def __init__(self, name: str) -> None:
        """Start the thread; ``name``: of the environment."""
        self._worker = DaemonThread(name)
        self._late = False  # a call was cancelled, and may not have returned

    async def call(self, function: Callable[..., T], *arguments: object, **named: object) -> T:
        """What a call returns or raises. A call that is cancelled goes on: a thread cannot be stopped."""
        try:
            return await asyncio.wrap_future(self._worker.submit(partial(function, *arguments, **named)))
        except asyncio.CancelledError:
            self._late = True
            raise

    async def close(self, last: Callable[[], object] | None = None) -> None:
        """Make a last call, if there is one, and let the thread end after its calls; do not wait for a late one."""
        try:
            if last is not None and self._late:
                self._worker.submit(last)
            elif last is not None:
                await self.call(last)
        finally:
            self._worker.close()
