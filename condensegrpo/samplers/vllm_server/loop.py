"""An event loop in a thread of its own, for connections that outlive the loops of single rollouts. Standard library."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
GOODBYE_SECONDS = 0.02  # connections that were closed let their sockets go in one of the loop's next rounds


class LoopThread:
    """Runs coroutines beside whoever asks: from another event loop, or from none."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def join(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, awaited from another loop. If the caller is cancelled, so is the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``work`` and go on; its result is to be asked for."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, waited for without a loop. An interruption (Ctrl-C) cancels the work."""
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what is under way and end the thread. May be called twice."""
        if self._loop.is_closed():
            return
        self.wait(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(GOODBYE_SECONDS)
