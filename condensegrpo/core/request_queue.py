"""Requests of event loops to a model that a worker thread drives. Standard library only.

    event loop   await queue.submit(a) ─┐
                 await queue.submit(b) ─┼─▶ waiting ─▶ drive([a, b]) ─▶ a's reply          in the worker thread
                 await queue.submit(c) ─┘              drive([c])    ─▶ b's and c's replies

A **driver** is a function that the worker thread calls with the requests that are new to it. It returns or yields
those that it has finished, whether new or from earlier calls, each with its reply or an error. All others are under
way, and the driver is called again, with further requests or none, until it has finished each of them:

* a driver that computes batches finishes every request in the call that brings it;
* a driver that decodes continuously computes one forward pass per call: replies join and leave between passes.

An error that a driver raises fails all requests under way; what it returns for them later is ignored. So do
``most_idle_calls`` in a row that finish nothing: the driver has lost its requests. A driver may
look at ``QueuedRequest.abandoned`` to save work, and finishes an abandoned request with any reply.
"""

import asyncio
import contextlib
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from condensegrpo.core.threads import DaemonThread

K = TypeVar("K", bound=Hashable)
Q = TypeVar("Q")
R = TypeVar("R")
SETTLE_SECONDS = 0.002  # a batch starts when no request arrived for this time; a batch takes far longer
SETTLE_ROUNDS = 64  # and in this many rounds of the event loop: a busy machine must not change a batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueuedRequest(Generic[Q, R]):
    """A request and the future of its reply, which belongs to the event loop of its caller."""

    value: Q
    reply: asyncio.Future[R]

    def abandoned(self) -> bool:
        """Whether no caller waits for the reply any more. May be called in any thread."""
        return self.reply.done() or self.reply.get_loop().is_closed()


Outcomes = Iterable[tuple[QueuedRequest[Q, R], R | Exception]]
Driver = Callable[[Sequence[QueuedRequest[Q, R]]], Outcomes[Q, R]]
FailureOf = Callable[[Exception, int], Exception]  # an error and the number of requests that fail by it ─▶ their error


@dataclass(eq=False, kw_only=True)
class RequestQueue(Generic[Q, R]):
    """The requests of any number of event loops. The driver gets them in the order in which they came.

        queue = RequestQueue(drive=drive, worker=ThreadPoolExecutor(1))
        reply = await queue.submit(request)

    A process that ends while a ``DaemonThread`` is in torch's code aborts: join such a worker first.
    """

    drive: Driver[Q, R]
    worker: Executor | DaemonThread  # of one thread; queues may share it: their calls take turns
    failure: FailureOf = lambda error, requests: error  # of an error that concerns all requests under way
    most: int = sys.maxsize  # requests under way at once; further ones wait
    settle: bool = False  # whether a call waits until no further request arrives: for drivers that compute batches
    call_seconds: float | None = None  # without a call that begins or ends for longer, requests fail; None: no limit
    most_idle_calls: int = 1_000_000  # in a row that finish no request: more passes than any reply has tokens
    _state: threading.Condition = field(default_factory=threading.Condition, init=False)  # guards what follows
    _waiting: deque[QueuedRequest[Q, R]] = field(default_factory=deque, init=False)
    _under_way: list[QueuedRequest[Q, R]] = field(default_factory=list, init=False)
    _running: bool = field(default=False, init=False)  # the worker has a call to make, or is making it
    _pauses: int = field(default=0, init=False)
    _idle_calls: int = field(default=0, init=False)  # in a row
    _progress: float = field(default=0.0, init=False)  # time.monotonic() when a call was due, begun or done last
    _settling: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def open(self) -> int:
        """The number of requests whose callers wait for a reply."""
        with self._state:
            return sum(not request.abandoned() for request in (*self._waiting, *self._under_way))

    async def submit(self, value: Q) -> R:
        """The reply to a request. Cancelling a caller affects no other request."""
        loop = asyncio.get_running_loop()
        request: QueuedRequest[Q, R] = QueuedRequest(value=value, reply=loop.create_future())
        with self._state:
            self._waiting.append(request)
            if not self._running:
                self._progress = time.monotonic()
        self._start_soon(loop)
        try:
            while not request.reply.done():
                await asyncio.wait([request.reply], timeout=self._seconds_left())
                if self._seconds_left() == 0 and not request.reply.done():
                    hangs = TimeoutError(f"no result within {self.call_seconds:g} seconds")
                    raise self.failure(hangs, self.open)
            return request.reply.result()
        finally:
            request.reply.cancel()  # without effect on a reply that is there

    @contextlib.contextmanager
    def paused(self, seconds: float | None = None) -> Iterator[None]:
        """Wait until the driver has no request; requests that come meanwhile wait until the end of the block."""
        with self._state:
            if not self._state.wait_for(lambda: not self._running, seconds):
                raise TimeoutError(f"waiting for {len(self._under_way)} requests took longer than {seconds} seconds")
            self._pauses += 1
        try:
            yield
        finally:
            with self._state:
                self._pauses -= 1
                self._progress = time.monotonic()
            self._start_if_idle()

    def close(self) -> None:
        """Fail the requests that a worker left undone. Call it after the worker's shutdown."""
        with self._state:
            self._end(RuntimeError("the queue was closed"))

    def _start_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """In an event loop: have the waiting requests computed, at once or when their number has settled."""
        if not self.settle:
            self._start_if_idle()
            return
        settling = self._settling is not None and not self._settling.done() and self._settling.get_loop() is loop
        if not self._running and not settling:
            self._settling = loop.create_task(self._start_when_settled())

    async def _start_when_settled(self) -> None:
        """Start when the queue has stopped growing, so that all ready requests share a batch."""
        size = 0
        try:
            while size < len(self._waiting) < self.most:
                size = len(self._waiting)
                await asyncio.sleep(SETTLE_SECONDS)
                for _ in range(SETTLE_ROUNDS):
                    await asyncio.sleep(0)
        finally:  # also if this event loop ends: requests of others may wait
            self._start_if_idle()

    def _start_if_idle(self) -> None:
        """Have the waiting requests computed, unless the worker is at others or the queue is paused."""
        with self._state:
            if self._waiting and not self._running and not self._pauses:
                self._submit_call()

    def _submit_call(self) -> None:
        """Have the worker make the next call, after the calls of other queues. The state is locked."""
        try:
            call = self.worker.submit(self._call)
        except RuntimeError as error:  # it was shut down
            self._end(error)
        else:
            self._running = True
            call.add_done_callback(self._end_unless_made)

    def _end_unless_made(self, call: "Future[None]") -> None:
        """Fail all requests if the worker could not make a call: the initializer of its thread raised."""
        error = None if call.cancelled() else call.exception()
        if error is not None:
            with self._state:
                self._end(_as_exception(error))

    def _call(self) -> None:
        """In the worker: call the driver once."""
        with self._state:
            new = self._take()
            self._under_way += new
        finished = set[QueuedRequest[Q, R]]()
        self._progress = time.monotonic()
        try:
            for request, outcome in self.drive(new) if self._under_way else ():
                finished.add(request)
                _deliver(request, outcome)
            self._idle_calls = 0 if finished or not self._under_way else self._idle_calls + 1
            if self._idle_calls > self.most_idle_calls:
                raise RuntimeError(f"{self._idle_calls} calls in a row finished none of the requests: they are lost")
        except BaseException as error:  # the boundary to the model; a panic of Rust code is no Exception
            failed = [request for request in self._under_way if request not in finished]
            self._idle_calls = 0
            self._fail(failed, _as_exception(error))
            finished.update(self._under_way)
        self._progress = time.monotonic()
        with self._state:
            self._under_way = [request for request in self._under_way if request not in finished]
            if self._under_way or (self._waiting and not self.settle):
                self._submit_call()
                return
            self._running = False
            self._state.notify_all()
            for loop in {request.reply.get_loop() for request in self._waiting}:
                _call_in(loop, self._start_soon, loop)

    def _take(self) -> list[QueuedRequest[Q, R]]:
        """The requests that may join those under way."""
        taken = list[QueuedRequest[Q, R]]()
        while self._waiting and len(self._under_way) + len(taken) < self.most:
            request = self._waiting.popleft()
            if not request.abandoned():
                taken.append(request)
        return taken

    def _end(self, error: Exception) -> None:
        """Fail all requests: there is no worker any more. The state is locked."""
        self._fail([*self._under_way, *self._waiting], error)
        self._under_way.clear()
        self._waiting.clear()
        self._running = False
        self._state.notify_all()

    def _fail(self, requests: Sequence[QueuedRequest[Q, R]], error: Exception) -> None:
        for request in requests:
            _deliver(request, self.failure(error, len(requests)))

    def _seconds_left(self) -> float | None:
        """Until the worker counts as one that hangs, in a call of the driver or before it; never in a pause."""
        if self.call_seconds is None or self._pauses:
            return self.call_seconds
        return max(0.0, self._progress + self.call_seconds - time.monotonic())


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def _deliver(request: QueuedRequest[Q, R], outcome: R | Exception) -> None:
    _call_in(request.reply.get_loop(), _set, request.reply, outcome)


def _set(reply: asyncio.Future[R], outcome: R | Exception) -> None:
    if reply.done():
        return
    if isinstance(outcome, Exception):
        reply.set_exception(outcome)
    else:
        reply.set_result(outcome)


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """Have an event loop make a call. One that was closed does not: no caller waits in it."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)


@dataclass(slots=True, eq=False)
class _Pending(Generic[R]):
    task: asyncio.Task[R]
    waiting: int = 0  # callers


@dataclass(slots=True, eq=False)
class SharedResults(Generic[K, R]):
    """Expensive results, remembered by key and computed once for all concurrent callers.

        a   asks ──── computes ──── result
        b           asks ────────── result            awaits the computation of a
        c                                   asks ─ result       remembered

    It has the ``most`` results that were requested last, and serves one event loop after another; failures are
    forgotten.
    """

    most: int
    _results: OrderedDict[K, R] = field(default_factory=OrderedDict, init=False)
    _pending: dict[K, _Pending[R]] = field(default_factory=dict, init=False)

    def __contains__(self, key: K) -> bool:
        """Whether the result is remembered or being computed."""
        return key in self._results or key in self._pending

    async def get(self, key: K, compute: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """The result of a key. What ``compute`` raises, all who await this computation get.

        Cancelling a caller affects no other; the computation is cancelled when no caller awaits it any more.
        """
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key]
        loop = asyncio.get_running_loop()
        pending = self._pending.get(key)
        if pending is None or pending.task.get_loop() is not loop:
            pending = self._pending[key] = _Pending(loop.create_task(self._computed(key, compute)))
        pending.waiting += 1
        try:
            return await asyncio.shield(pending.task)
        finally:
            pending.waiting -= 1
            if not pending.waiting:
                pending.task.cancel()
                if self._pending.get(key) is pending:
                    del self._pending[key]

    def forget(self, key: K) -> None:
        """Compute this result again when it is requested again."""
        self._results.pop(key, None)

    async def _computed(self, key: K, compute: Callable[[], Coroutine[Any, Any, R]]) -> R:
        result = self._results[key] = await compute()
        while len(self._results) > self.most:
            self._results.popitem(last=False)
        return result
