"""Batches requests that wait at the same time and computes each batch in one worker thread, off the event loop.

Independent of models: the caller supplies the function that computes a batch. A request that arrives during a batch
waits for the next batch.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from condensegrpo.core.errors import SamplerError

Q = TypeVar("Q")
R = TypeVar("R")
SETTLE_SECONDS = 0.002  # a batch starts when no request arrived for this time; a batch takes far longer
SETTLE_ROUNDS = 64  # and in this many rounds of the event loop: a busy machine must not change a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Generic[Q, R]):
    """A request and the future of its reply."""

    request: Q
    reply: asyncio.Future[R]


@dataclass(eq=False)
class RequestBatcher(Generic[Q, R]):
    """A queue of requests. It serves one event loop at a time, and any number of them one after another.

    Requests of a batch whose ``reply`` is done were cancelled.
    """

    answer: Callable[[Sequence[Waiting[Q, R]]], Sequence[R]]  # in the worker: one reply per request, in order
    worker: ThreadPoolExecutor  # of one thread where ``answer`` cannot run twice at once; queues may share it
    most: int  # requests per batch
    doing: str  # for error messages, with a place for the number of requests: ``generating {} replies``
    _waiting: list[Waiting[Q, R]] = field(default_factory=list, init=False)
    _drain: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def busy(self) -> bool:
        """Whether requests wait or are computed. May be read in any thread."""
        drain = self._drain
        return drain is not None and not drain.done() and not drain.get_loop().is_closed()

    async def ask(self, request: Q) -> R:
        """The reply to a request, computed in one batch with the other waiting requests.

        Cancelling a caller affects no other request: its reply is discarded.

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
        """Compute batch after batch until no request waits. There is no await between the last check and the return."""
        batch: list[Waiting[Q, R]] = []
        try:
            while self._waiting:
                await self._settle()
                batch = self._take(loop)
                if batch:
                    await self._reply(batch, loop)
        except asyncio.CancelledError:  # the whole event loop ends: no caller may wait for a reply that cannot come
            for waiting in (*batch, *self._take(loop)):
                waiting.reply.cancel()
            raise

    async def _settle(self) -> None:
        """Wait until the queue stops growing, so that all ready requests share a batch."""
        size = 0
        while size < len(self._waiting) < self.most:
            size = len(self._waiting)
            await asyncio.sleep(SETTLE_SECONDS)
            for _ in range(SETTLE_ROUNDS):
                await asyncio.sleep(0)

    def _take(self, loop: asyncio.AbstractEventLoop) -> list[Waiting[Q, R]]:
        """The next batch: the oldest requests first, without cancelled ones and those of an event loop that ended."""
        ready = [each for each in self._waiting if not each.reply.done() and each.reply.get_loop() is loop]
        self._waiting = ready[self.most :]
        return ready[: self.most]

    async def _reply(self, batch: Sequence[Waiting[Q, R]], loop: asyncio.AbstractEventLoop) -> None:
        """Compute one batch off the loop and deliver the replies."""
        try:
            replies = await loop.run_in_executor(self.worker, self.answer, batch)
        except Exception as error:  # the boundary to the model: every request of the batch fails
            doing = self.doing.format(len(batch))
            for waiting in batch:
                if not waiting.reply.done():
                    known = isinstance(error, SamplerError)
                    failure = error if known else SamplerError(f"{doing}: {type(error).__name__}: {error}")
                    waiting.reply.set_exception(failure)
            return
        for waiting, reply in zip(batch, replies, strict=True):
            if not waiting.reply.done():
                waiting.reply.set_result(reply)
