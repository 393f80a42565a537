"""Requests that wait at the same time are answered as one batch, off the event loop, by one worker.

Knows nothing of models: what a batch is and how it is answered is the caller's. A request that comes while a batch is
under way waits for the next one.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from condensegrpo.core.errors import SamplerError

Q = TypeVar("Q")
R = TypeVar("R")
SETTLE_SECONDS = 0.002  # a batch starts once no request has come for this long; a batch takes far longer than that
SETTLE_ROUNDS = 64  # of the event loop, nor in so many: a busy machine must not decide who shares a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Generic[Q, R]):
    """A request with the reply that is owed to it."""

    request: Q
    reply: asyncio.Future[R]


class RequestBatcher(Generic[Q, R]):
    """A queue. It serves one event loop at a time, and any number of them one after another."""

    def __init__(
        self,
        answer: Callable[[Sequence[Waiting[Q, R]]], Sequence[R]],
        *,
        worker: ThreadPoolExecutor,
        most: int,
        doing: str,
    ) -> None:
        """Set the queue up.

        Args:
            answer: called in the worker with a batch; gives one reply a request, in order. A request whose ``reply`` is
                done was given up.
            worker: of one thread where ``answer`` cannot run twice at once; queues may share it.
            most: requests of a batch.
            doing: for errors: what the queue does with so many requests, such as ``generating {} replies``.
        """
        self._answer = answer
        self._worker = worker
        self._most = most
        self._doing = doing
        self._waiting: list[Waiting[Q, R]] = []
        self._drain: asyncio.Task[None] | None = None

    async def ask(self, request: Q) -> R:
        """The reply to a request, computed together with whatever else waits.

        A caller that goes away (time-out, cancellation) harms nobody: its reply is thrown away.

        Raises:
            SamplerError: ``answer`` failed.
        """
        loop = asyncio.get_running_loop()
        waiting: Waiting[Q, R] = Waiting(request=request, reply=loop.create_future())
        self._waiting.append(waiting)
        if self._drain is None or self._drain.done() or self._drain.get_loop() is not loop:
            self._drain = loop.create_task(self._serve(loop))
        return await waiting.reply

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer batch after batch until nobody waits. Ends without an await after the last look at the queue."""
        batch: list[Waiting[Q, R]] = []
        try:
            while self._waiting:
                await self._settle()
                batch = self._take(loop)
                if batch:
                    await self._reply(batch, loop)
        except asyncio.CancelledError:  # with the whole loop: nobody must wait for a reply that will not come
            for waiting in (*batch, *self._take(loop)):
                waiting.reply.cancel()
            raise

    async def _settle(self) -> None:
        """Wait until the queue stops growing, so that all that are ready share a batch."""
        size = 0
        while size < len(self._waiting) < self._most:
            size = len(self._waiting)
            await asyncio.sleep(SETTLE_SECONDS)
            for _ in range(SETTLE_ROUNDS):
                await asyncio.sleep(0)

    def _take(self, loop: asyncio.AbstractEventLoop) -> list[Waiting[Q, R]]:
        """The next batch: the oldest requests first, without those that were given up or belong to a loop that died."""
        ready = [one for one in self._waiting if not one.reply.done() and one.reply.get_loop() is loop]
        self._waiting = ready[self._most :]
        return ready[: self._most]

    async def _reply(self, batch: Sequence[Waiting[Q, R]], loop: asyncio.AbstractEventLoop) -> None:
        """Compute one batch off the loop and hand the replies out."""
        try:
            replies = await loop.run_in_executor(self._worker, self._answer, batch)
        except Exception as error:  # the boundary to the model: every request of the batch hears of it
            for waiting in batch:
                if not waiting.reply.done():
                    waiting.reply.set_exception(self._told(error, len(batch)))
            return
        for waiting, reply in zip(batch, replies, strict=True):
            if not waiting.reply.done():
                waiting.reply.set_result(reply)

    def _told(self, error: Exception, count: int) -> SamplerError:
        if isinstance(error, SamplerError):
            return error
        return SamplerError(f"{self._doing.format(count)}: {type(error).__name__}: {error}")
