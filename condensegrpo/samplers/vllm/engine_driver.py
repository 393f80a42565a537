"""Drives vLLM's engine in one thread for a queue of requests: each enters the engine when it arrives and leaves it when
it is done. Between requests the engine sleeps, wakes and loads weights.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count

import torch

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols import NamedTensors
from condensegrpo.core.request_queue import Outcomes, QueuedRequest, RequestQueue
from condensegrpo.core.trajectory import Finish, Generation, SamplingParams
from condensegrpo.learner.devices import on_this_device, stream_restored
from condensegrpo.samplers.vllm.engine import PARTS, VllmEngine
from condensegrpo.samplers.vllm.request import refused
from condensegrpo.samplers.vllm.tensor_parallel import LockstepEngine

STUCK_SECONDS = 600.0  # a step that takes longer hangs: its requests fail
ABANDONED = Generation(token_ids=(), logprobs=(), finish=Finish.ABORT)

_Prompt = tuple[Sequence[int], SamplingParams | None]  # without parameters the prompt is only read
_Request = QueuedRequest[_Prompt, Generation]


class EngineDriver:
    """An engine and the requests that are in it."""

    def __init__(self, engine: VllmEngine | LockstepEngine) -> None:
        self._engine = engine
        self._dropped = False  # the weights, when it was put to sleep
        self._names = map(str, count())
        self._requests: dict[str, _Request] = {}  # in the engine, by their names there
        self._worker = ThreadPoolExecutor(  # one thread: the engine is not re-entrant
            max_workers=1,
            thread_name_prefix="vllm",
            initializer=partial(_begin_thread, on_this_device()),
        )
        self._queue = RequestQueue(drive=self._step, worker=self._worker, failure=_failure, call_seconds=STUCK_SECONDS)

    async def submit(self, prompt_ids: Sequence[int], params: SamplingParams | None) -> Generation:
        """The reply to a prompt; without ``params`` the log-probabilities of the prompt itself.

        Cancelling the caller takes its request out of the engine and affects no other request.

        Raises:
            SamplerError: vLLM refused the request or failed.
        """
        return await self._queue.submit((prompt_ids, params))

    def load(self, named_tensors: NamedTensors, version: int) -> None:
        """Hand new weights to the engine.

        Raises:
            SamplerError: requests are in flight, or the weights are not those of the model.
        """
        if self._queue.open:
            raise SamplerError(
                f"updating the sampler's weights to version {version}: {self._queue.open} requests are under way, and "
                f"their replies would be of two policies. Await them first."
            )
        with ExitStack() as paused:
            with _in_time("waiting for the last step before an update of the weights"):
                paused.enter_context(self._queue.paused(STUCK_SECONDS))
            self._engine.abort(list(self._requests))  # of a step that failed
            self._requests.clear()
            with stream_restored(), self._engine.exclusive():
                self._engine.wake("weights")
                self._engine.load(named_tensors)
                self._dropped = False
                # last: so the learner's copies of weights never lie beside keys and values
                self._engine.wake("kv_cache")

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the GPU until the next request or update, or until the next update if the weights are dropped."""
        if not self._engine.asleep:
            asleep = self._worker.submit(partial(self._engine.sleep, keep_weights=keep_weights))
            with _in_time("putting vLLM to sleep"):
                asleep.result(timeout=STUCK_SECONDS)
            self._dropped = not keep_weights

    def close(self) -> None:
        """End the thread and free the engine. Later requests fail."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._queue.close()
        self._engine.close()

    def _step(self, new: Sequence[_Request]) -> Outcomes[_Prompt, Generation]:
        """Driver: one step of the engine, which new requests join and abandoned ones leave."""
        if self._dropped:
            raise SamplerError("the weights were dropped when vLLM was put to sleep, and no new ones were sent since")
        for part in PARTS:
            self._engine.wake(part)
        abandoned = [name for name, request in self._requests.items() if request.abandoned()]
        self._engine.abort(abandoned)
        for name in abandoned:
            yield self._requests.pop(name), ABANDONED
        for request in new:
            name = next(self._names)
            try:
                self._engine.add(name, *request.value)
            except Exception as error:  # the boundary to vLLM: a refusal ends this request alone
                yield request, refused(request.value[0], error)
            else:
                self._requests[name] = request
        if self._requests:
            for name, outcome in self._engine.step().items():
                yield self._requests.pop(name), outcome


def _begin_thread(use_device: Callable[[], None]) -> None:
    use_device()
    # OpenMP keeps a number of threads per thread, and vLLM reads this thread's first
    torch.set_num_threads(torch.get_num_threads())


def _failure(error: Exception, requests: int) -> SamplerError:
    return SamplerError(f"stepping vLLM with {requests} requests under way: {type(error).__name__}: {error}")


@contextmanager
def _in_time(doing: str) -> Iterator[None]:
    """Turn the TimeoutError of a wait for the worker into an error that says what was waited for."""
    try:
        yield
    except TimeoutError as error:
        raise SamplerError(
            f"{doing}: vLLM did not finish within {STUCK_SECONDS:g} seconds. It hangs: end the process and resume the "
            f"run."
        ) from error
