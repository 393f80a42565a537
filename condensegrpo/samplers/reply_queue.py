"""Hands requests of event loops to a decoder that runs in a worker thread, and its replies back.

A request joins before the next forward pass. The worker steps until no reply is under way, so that no event loop has to
be quick for that.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import Generation, SamplingParams

if TYPE_CHECKING:  # imports transformers, which a dry run does not need
    from condensegrpo.samplers.decoding import BatchRow, ContinuousBatch

Answer = Generation | SamplerError


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A prompt and the future of its reply."""

    prompt: tuple[int, ...]
    params: SamplingParams
    future: asyncio.Future[Generation]

    def abandoned(self) -> bool:
        """Whether nobody waits for the reply any more."""
        return self.future.done() or self.future.get_loop().is_closed()


@dataclass(eq=False, kw_only=True)
class ReplyQueue:
    """The requests of any number of event loops."""

    decoder: "ContinuousBatch"
    worker: ThreadPoolExecutor  # of one thread; may have other jobs
    weights: threading.Lock  # held while a pass reads them
    others: Callable[[], bool]  # whether other jobs wait for the worker
    _waiting: deque[QueuedRequest] = field(default_factory=deque)
    _under_way: dict["BatchRow", QueuedRequest] = field(default_factory=dict)  # of the worker
    _state: threading.Condition = field(default_factory=threading.Condition)  # guards _running
    _running: bool = False

    async def ask(self, request: tuple[tuple[int, ...], SamplingParams]) -> Generation:
        """The reply to a prompt. Cancelling a caller affects no other request: its reply ends.

        Raises:
            SamplerError: the model failed, or the sampler is closed.
        """
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        with self._state:
            self._waiting.append(QueuedRequest(prompt=request[0], params=request[1], future=future))
            if not self._running:
                self._running = self._submit()
        return await future

    def free(self) -> None:
        """Wait until no request is under way, then drop all keys and values."""
        with self._state:
            self._state.wait_for(lambda: not self._running)
            self.decoder.clear()

    def close(self) -> None:
        """Fail what the worker, which has ended, left undone, and drop all keys and values."""
        self._fail(RuntimeError("the sampler was closed"))

    def _submit(self) -> bool:
        try:
            self.worker.submit(self._run)
        except RuntimeError as error:  # shut down
            self._fail(error)
            return False
        return True

    def _run(self) -> None:
        """In the worker: one pass after another. Other jobs of the worker come in between."""
        while True:
            try:
                with self.weights:
                    self._join()
                    ended = self.decoder.step()
                self._deliver([(self._under_way.pop(reply), generation) for reply, generation in ended])
            except Exception as error:  # the boundary to the model: every request under way fails
                self._fail(error)
            with self._state:
                if not self._waiting and not self._under_way:
                    self._running = False
                    self._state.notify_all()
                    return
                if self.others():
                    self._running = self._submit()
                    self._state.notify_all()
                    return

    def _join(self) -> None:
        while self._waiting and self.decoder.room:
            request = self._waiting[0]  # it waits until it has joined: if that fails, so does the request
            if not request.abandoned():
                reply = self.decoder.join(request.prompt, request.params, abandoned=request.abandoned)
                self._under_way[reply] = request
            self._waiting.popleft()

    def _fail(self, error: Exception) -> None:
        """Every request under way fails; those that wait, too, if there is no worker any more."""
        requests = list(self._under_way.values()) or list(self._waiting)
        if not self._under_way:
            self._waiting.clear()
        self._under_way.clear()
        self.decoder.clear()
        failure = error
        if not isinstance(failure, SamplerError):
            doing = f"generating a batch of {len(requests)} replies"
            failure = SamplerError(f"{doing}: {type(error).__name__}: {error}")
        self._deliver([(request, failure) for request in requests])

    @staticmethod
    def _deliver(answers: Sequence[tuple[QueuedRequest, Answer]]) -> None:
        """Set the futures, in their own event loops."""
        for loop in {request.future.get_loop() for request, _ in answers}:
            own = [(request.future, answer) for request, answer in answers if request.future.get_loop() is loop]
            with contextlib.suppress(RuntimeError):  # it was closed: nobody waits
                loop.call_soon_threadsafe(_set, own)


def _set(answers: Sequence[tuple[asyncio.Future[Generation], Answer]]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, SamplerError):
            future.set_exception(answer)
        else:
            future.set_result(answer)
