"""Feeds vLLM's engine beside an event loop: takes requests in and out, steps the engine in a thread, delivers replies.

A request enters the engine when it arrives and leaves it when it is done: no request waits for another.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols import NamedTensors
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.learner.devices import on_this_device, stream_restored
from condensegrpo.samplers.vllm.engine import PARTS, VllmEngine
from condensegrpo.samplers.vllm.request import refused
from condensegrpo.samplers.vllm.tensor_parallel import LockstepEngine

STRETCH_SECONDS = 1.0  # longest run of steps in the thread before the event loop gets their results
STUCK_SECONDS = 600.0  # a run of steps that takes longer hangs: its requests fail

Outcome = Generation | SamplerError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams | None  # None: the prompt is only read
    reply: asyncio.Future[Generation]


class EngineQueue:
    """The requests of an engine. It serves one event loop at a time, and any number of them one after another."""

    def __init__(self, engine: VllmEngine | LockstepEngine) -> None:
        self._engine = engine
        self._dropped = False  # the weights, when it was put to sleep
        self._numbers = count()
        self._new: list[_Request] = []  # not in the engine yet
        self._open: dict[str, _Request] = {}  # in the engine
        self._abandoned: list[str] = []  # in the engine, but no caller waits for them
        self._driver: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(  # one thread: the engine is not re-entrant
            max_workers=1,
            thread_name_prefix="vllm",
            initializer=partial(_begin_thread, on_this_device()),
        )

    async def ask(self, prompt_ids: Sequence[int], params: SamplingParams | None) -> Generation:
        """The reply to a prompt; without ``params`` the log-probabilities of the prompt itself.

        Cancelling the caller takes its request out of the engine and affects no other request.

        Raises:
            SamplerError: vLLM refused the request or failed.
        """
        loop = asyncio.get_running_loop()
        request = _Request(
            id=str(next(self._numbers)), prompt_ids=prompt_ids, params=params, reply=loop.create_future()
        )
        self._new.append(request)
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._serve(loop))
        return await request.reply

    def load(self, named_tensors: NamedTensors, version: int) -> None:
        """Hand new weights to the engine.

        Raises:
            SamplerError: requests are in flight, or the weights are not those of the model.
        """
        waited = self._worker.submit(lambda: None)  # a run of steps whose event loop ended may not have finished
        _result(waited, "waiting for the last step before an update of the weights")
        if self._settle():
            raise SamplerError(
                f"updating the sampler's weights to version {version}: {len(self._open) + len(self._new)} requests are "
                f"under way, and their replies would be of two policies. Await them first."
            )
        self._engine.abort(self._take_abandoned())
        with stream_restored(), self._engine.exclusive():
            self._engine.wake("weights")
            self._engine.load(named_tensors)
            self._dropped = False
            self._engine.wake("kv_cache")  # last: so the learner's copies of weights never lie beside keys and values

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the GPU until the next request or update, or until the next update if the weights are dropped."""
        if not self._engine.asleep:
            work = self._worker.submit(partial(self._engine.sleep, keep_weights=keep_weights))
            _result(work, "putting vLLM to sleep")
            self._dropped = not keep_weights

    def close(self) -> None:
        """End the thread and free the engine. Later requests fail."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._engine.close()

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Step until no request waits. There is no await between the last check of the queue and the return."""
        try:
            while self._settle():
                await self._stretch(loop)
        except asyncio.CancelledError:  # the whole event loop ends: no caller may wait for a reply that cannot come
            for request in (*self._open.values(), *self._new):
                if request.reply.get_loop() is loop:
                    request.reply.cancel()
            raise

    def _settle(self) -> bool:
        """Set requests aside that were cancelled or whose event loop ended; return whether any request is left."""
        self._abandoned += [name for name, request in self._open.items() if not _awaited(request)]
        self._open = {name: request for name, request in self._open.items() if _awaited(request)}
        self._new = list(filter(_awaited, self._new))
        return bool(self._open or self._new)

    async def _stretch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Step the engine in its thread until a request finishes or arrives, and deliver the replies."""
        new, self._new = self._new, []
        self._open.update({request.id: request for request in new})
        abandoned, waiting = self._take_abandoned(), tuple(self._open.values())
        try:
            work = loop.run_in_executor(self._worker, self._advance, new, abandoned, waiting)
            outcomes = await asyncio.wait_for(work, STUCK_SECONDS)
        except Exception as error:  # the boundary to vLLM: every request in the engine fails
            reason = str(error) or f"no result within {STUCK_SECONDS:g} seconds"  # a TimeoutError has no message
            failure = f"stepping vLLM with {len(waiting)} requests under way: {type(error).__name__}: {reason}"
            outcomes = {request.id: SamplerError(failure) for request in waiting}
            self._abandoned += outcomes
        for name, outcome in outcomes.items():
            reply = self._open.pop(name).reply
            if reply.done():
                continue
            if isinstance(outcome, SamplerError):
                reply.set_exception(outcome)
            else:
                reply.set_result(outcome)

    def _advance(
        self, new: Sequence[_Request], abandoned: Sequence[str], waiting: Sequence[_Request]
    ) -> Mapping[str, Outcome]:
        """In the worker thread: update the engine's requests, then step until one is done, cancelled or new."""
        if self._dropped:
            raise SamplerError("the weights were dropped when vLLM was put to sleep, and no new ones were sent since")
        for part in PARTS:
            self._engine.wake(part)
        self._engine.abort(abandoned)
        outcomes: dict[str, Outcome] = {}
        for request in new:
            fault = self._add(request)
            if fault is not None:
                outcomes[request.id] = fault
        until = time.monotonic() + STRETCH_SECONDS
        while not outcomes and not self._new and time.monotonic() < until:
            outcomes.update(self._engine.step())
            if any(request.reply.done() for request in waiting):
                break
        return outcomes

    def _add(self, request: _Request) -> SamplerError | None:
        """Put a request into the engine; an error of vLLM ends this request alone and is returned."""
        try:
            if request.params is None:
                self._engine.add_reading(request.id, request.prompt_ids)
            else:
                self._engine.add(request.id, request.prompt_ids, request.params)
        except Exception as error:  # the boundary to vLLM
            return refused(request.prompt_ids, error)
        return None

    def _take_abandoned(self) -> list[str]:
        abandoned, self._abandoned = self._abandoned, []
        return abandoned


def _begin_thread(use_device: Callable[[], None]) -> None:
    use_device()
    # OpenMP keeps a number of threads per thread, and vLLM reads this thread's first
    torch.set_num_threads(torch.get_num_threads())


def _awaited(request: _Request) -> bool:
    """Whether a caller waits for the reply: it was not cancelled, and its event loop runs."""
    return not request.reply.done() and request.reply.get_loop().is_running()


def _result(work: Future[None], doing: str) -> None:
    """Wait for the worker thread for a bounded time."""
    try:
        work.result(timeout=STUCK_SECONDS)
    except TimeoutError as error:
        raise SamplerError(
            f"{doing}: vLLM did not finish within {STUCK_SECONDS:g} seconds. It hangs: end the process and resume the "
            f"run."
        ) from error
