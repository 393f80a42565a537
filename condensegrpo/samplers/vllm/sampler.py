"""The sampler for throughput: vLLM in the learner's process, with the learner's weights.

``EngineDriver`` drives vLLM's engine in one thread for a queue of requests: each enters the engine when it arrives and
leaves it when it is done. Between requests the engine sleeps, wakes and loads weights.

    caller          in_new_thread(VllmEngine) ─▶ EngineDriver.submit ─▶ load ─▶ sleep ─▶ close
    its thread      creates it                   steps it               loads   sleeps   closes

vLLM keeps the stream of the thread in which it samples first, at its creation. The next step in a thread with another
stream is computed on that one, while its tokens are copied on the first without waiting for them.
"""

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from itertools import count
from typing import Annotated, TypeVar

import torch
from annotated_types import Ge

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols.sampler import NamedTensors, Sampler
from condensegrpo.core.request_queue import Outcomes, QueuedRequest, RequestQueue
from condensegrpo.core.threads import DaemonThread
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.learner.devices import on_this_device, synchronize
from condensegrpo.learner.model_folder import trained_steps
from condensegrpo.learner.settings import DtypeName, LoraSettings
from condensegrpo.samplers.vllm.engine import VllmEngine
from condensegrpo.samplers.vllm.request import INSTALL, check_request, refused
from condensegrpo.samplers.vllm.settings import EngineSettings
from condensegrpo.samplers.vllm.tensor_parallel import Lockstep, lockstep
from condensegrpo.storage.media import MediaFolder

STUCK_SECONDS = 600.0  # a step that takes longer hangs: its requests fail
CLOSE_SECONDS = 30.0  # that ``close`` and the end of the process wait for the thread
ABANDONED = Generation(token_ids=(), logprobs=(), finish=FinishReason.ABORT)

E = TypeVar("E")
_Prompt = tuple[Sequence[int], SamplingParams | None]  # without parameters the prompt is only read
_Request = QueuedRequest[_Prompt, Generation]


def in_new_thread(create: Callable[[], E]) -> tuple[E, DaemonThread]:
    """An engine, created in a new thread on this thread's device."""
    thread = DaemonThread("vllm")
    atexit.register(thread.join, CLOSE_SECONDS)  # the process would abort while the thread is in torch's code
    atexit.register(thread.close)  # before
    try:
        thread.submit(partial(_begin, on_this_device())).result()
        return thread.submit(create).result(), thread
    except BaseException:
        thread.close()
        raise


class EngineDriver:
    """An engine and the requests that are in it. All calls of the engine are made in its thread."""

    def __init__(self, engine: VllmEngine, thread: DaemonThread, rounds: Lockstep | None = None) -> None:
        """Take over an engine that was created in the thread; ``rounds``: of the ranks that share its model."""
        self._engine, self._thread, self._rounds = engine, thread, rounds
        self._steps: VllmEngine | Lockstep = engine if rounds is None else rounds
        self._dropped = False  # the weights, when it was put to sleep
        self._names = map(str, count())
        self._requests: dict[str, _Request] = {}  # in the engine, by their names there
        self._closed = False
        self._queue = RequestQueue(
            drive=self._step,
            worker=thread,
            failure=lambda error, requests: SamplerError(
                f"stepping vLLM with {requests} requests under way: {type(error).__name__}: {error}"
            ),
            call_seconds=STUCK_SECONDS,
        )

    async def submit(self, prompt_ids: Sequence[int], params: SamplingParams | None) -> Generation:
        """The reply to a prompt; without ``params`` the log-probabilities of the prompt itself.

        Cancelling the caller takes its request out of the engine and affects no other request.
        """
        return await self._queue.submit((prompt_ids, params))

    def load(self, named_tensors: NamedTensors, version: int) -> None:
        """Hand new weights to the engine."""
        if self._queue.open:
            raise SamplerError(
                f"updating the sampler's weights to version {version}: {self._queue.open} requests are under way, and "
                f"their replies would be of two policies. Await them first."
            )
        with ExitStack() as paused:
            with _in_time("waiting for the last step before an update of the weights"):
                paused.enter_context(self._queue.paused(STUCK_SECONDS))
            synchronize()  # the learner's stream, for the engine's
            try:
                self._thread.submit(partial(self._load, named_tensors)).result()
            finally:
                synchronize()  # the engine's stream, for the learner's

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the GPU until the next request or update, or until the next update if the weights are dropped."""
        asleep = self._thread.submit(partial(self._sleep, keep_weights=keep_weights))
        with _in_time("putting vLLM to sleep"):
            asleep.result(timeout=STUCK_SECONDS)

    def close(self) -> None:
        """Free the engine and end the thread. Later requests fail. May be called twice."""
        if self._closed:
            return
        self._closed = True
        closed = self._thread.submit(self._steps.close)
        self._thread.close()
        with suppress(TimeoutError):  # it hangs, or ranks that share the model do: left to the end of the process
            closed.result(timeout=CLOSE_SECONDS)
        self._queue.close()

    def _load(self, named_tensors: NamedTensors) -> None:
        self._steps.abort(list(self._requests))  # of a step that failed
        self._requests.clear()
        if self._rounds is not None:
            self._rounds.pause()
        self._engine.wake(["weights"])
        self._engine.load(named_tensors)
        self._dropped = False
        self._engine.wake()  # last: so the learner's copies of weights never lie beside keys and values

    def _sleep(self, *, keep_weights: bool) -> None:
        if not self._engine.asleep:
            if self._rounds is not None:
                self._rounds.pause()
            self._engine.sleep(keep_weights=keep_weights)
            self._dropped = not keep_weights

    def _step(self, new: Sequence[_Request]) -> Outcomes[_Prompt, Generation]:
        """One step of the engine, which new requests join and abandoned ones leave."""
        if self._dropped:
            raise SamplerError("the weights were dropped when vLLM was put to sleep, and no new ones were sent since")
        if self._rounds is None:  # else all ranks wake for the first request of any rank
            self._engine.wake()
        abandoned = [name for name, request in self._requests.items() if request.abandoned()]
        self._steps.abort(abandoned)
        for name in abandoned:
            yield self._requests.pop(name), ABANDONED
        for request in new:
            name = next(self._names)
            try:
                self._steps.add(name, *request.value)
            except Exception as error:  # the boundary to vLLM: a refusal ends this request alone
                yield request, refused(request.value[0], error)
            else:
                self._requests[name] = request
        if self._requests:
            for name, outcome in self._steps.step().items():
                yield self._requests.pop(name), outcome


def _begin(use_device: Callable[[], None]) -> None:
    use_device()
    # OpenMP keeps a number of threads per thread, and vLLM reads this thread's first
    torch.set_num_threads(torch.get_num_threads())


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


ENGINE = EngineSettings()


class VllmSampler(Sampler):
    """Samples with vLLM: continuous batching, a prefix cache, weights in milliseconds.

    Generation defaults, log-probabilities and event loops: as in ``TransformersSampler``.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: DtypeName = "float32",
        max_model_len: Annotated[int, Ge(2)] | None = None,
        lora: LoraSettings | None = None,
        engine: EngineSettings = ENGINE,
        sleep: bool | None = None,
        media: MediaFolder | None = None,
        progress: Callable[[str], object] = str,
    ) -> None:
        """Load the model.

        Args:
            model_path: a Hugging Face folder or Hub id.
            max_model_len: most tokens of a prompt and its reply; by default the largest of the run's rollouts.
            lora: adapters that updates may bring instead of weights; a run gives its own.
            engine: memory and batches of vLLM's engine.
            sleep: whether memory is freed while the learner works; by default on a GPU, impossible elsewhere.
            media: where the pictures of prompts are; None: prompts show none.
            progress: is told what the start of vLLM is doing, in a thread of its own.
        """
        self.check_options(sleep=sleep)
        self._can_sleep = can_sleep = torch.cuda.is_available() if sleep is None else sleep
        self.version = trained_steps(model_path) or 0  # the optimiser step whose weights are in use
        loaded, thread = in_new_thread(
            lambda: VllmEngine(
                model_path,
                dtype=dtype,
                max_model_len=max_model_len,
                settings=engine,
                can_sleep=can_sleep,
                lora=lora,
                media=media,
                progress=progress,
            )
        )
        self.takes_adapters = loaded.adapters is not None  # vLLM computes them beside the base
        self._room = loaded.max_model_len
        self._batches = loaded.batches
        rounds = lockstep(loaded, thread) if engine.tensor_parallel_size > 1 else None
        self._driver = EngineDriver(loaded, thread, rounds)

    @staticmethod
    def check_options(*, sleep: bool | None = None, **_: object) -> None:
        """Check without a model what the signature cannot say."""
        if find_spec("vllm") is None:
            raise ValueError(f"vLLM is not installed. {INSTALL}")
        if sleep and not torch.cuda.is_available():
            raise ValueError("sleep=True: vLLM frees memory on a GPU only, and there is none; remove the option")

    def describe(self) -> str:
        """The sizes of the engine's batches, which vLLM chooses by the device unless they are set."""
        adapters = ", adapters beside the base" if self.takes_adapters else ""
        return f"vLLM: {self._batches}, {self._room} tokens a prompt with its reply{adapters}"

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply to one prompt, batched with the other requests.

        Cancelling a caller affects no other request: its request is removed from the engine.
        """
        check_request(prompt_ids, params, room=self._room)
        return await self._driver.submit(prompt_ids, params)

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[float]:
        """log π(output_ids[i] | prompt_ids, output_ids[:i]) for every i, (A,) nats at temperature 1."""
        check_request(prompt_ids, SamplingParams(max_tokens=len(output_ids)), room=self._room)
        tokens = (*prompt_ids, *output_ids)
        check_request(tokens, SamplingParams(max_tokens=1), room=self._room)  # the token that vLLM samples behind them
        return (await self._driver.submit(tokens, None)).logprobs[-len(output_ids) :]

    def update(self, named_tensors: NamedTensors, version: int) -> None:
        """Load the learner's weights by name, or its adapters alone, and drop all cached keys and values."""
        self._driver.load(named_tensors, version)
        self.version = version

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the GPU's memory until the next request or update; weights that are kept wait in main memory."""
        if self._can_sleep:
            # an update of adapters does not bring the base back
            self._driver.sleep(keep_weights=keep_weights or self.takes_adapters)

    def close(self) -> None:
        """Free engine and memory. Later requests fail."""
        self._driver.close()
