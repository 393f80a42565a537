"""The sampler for throughput: vLLM in this process, fed beside the event loop, with the learner's weights.

A request enters the engine when its trajectory is ready and leaves when it is done: nothing waits for anything else.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from typing import Literal

import torch

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols import NamedTensors
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.samplers.vllm.engine import VllmEngine
from condensegrpo.samplers.vllm.request import INSTALL, check_request

STRETCH_SECONDS = 1.0  # steps are taken off the loop for so long at most before it hears of what they brought
STUCK_SECONDS = 600.0  # a stretch that takes longer has hung: its requests fail

Outcome = Generation | SamplerError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams | None  # None: the prompt is only read
    reply: asyncio.Future[Generation]


class VllmSampler:
    """Samples with vLLM: continuous batching, a prefix cache, weights in milliseconds.

    The model folder's own generation defaults (top-k, repetition penalty, …) are ignored: log-probabilities are those
    of softmax(logits / temperature), and tokens are drawn from exactly that. One instance serves one event loop at a
    time, and any number of them one after another.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        max_model_len: int | None = None,
        kv_cache_gib: float | None = None,
        gpu_memory_utilization: float = 0.4,
        enforce_eager: bool | None = None,
        sleep: bool | None = None,
    ) -> None:
        """Load the model.

        Args:
            model_path: a Hugging Face folder or Hub id.
            max_model_len: most tokens of a prompt and its reply; a run gives the largest that its rollouts can make.
            kv_cache_gib: memory for keys and values; by default 1 on a CPU, and on a GPU what
                ``gpu_memory_utilization`` leaves.
            gpu_memory_utilization: share of the GPU's memory for weights, keys and values of the sampler, in (0, 1].
            enforce_eager: whether to do without compiled graphs; by default on a CPU only, where compiling takes long.
            sleep: whether memory is given back while the learner works; by default on a GPU, impossible elsewhere.
        """
        self.check_options(
            dtype=dtype,
            max_model_len=max_model_len,
            kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            sleep=sleep,
        )
        on_gpu = torch.cuda.is_available()
        self._model_path = model_path
        self._sleeps = on_gpu if sleep is None else sleep
        self._asleep = False
        self._version = 0
        self._numbers = count()
        self._new: list[_Request] = []  # not in the engine yet
        self._open: dict[str, _Request] = {}  # in the engine
        self._gone: list[str] = []  # in the engine, though nobody waits for them any more
        self._drive: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(  # of one: the engine is not re-entrant
            max_workers=1, thread_name_prefix="vllm", initializer=_take_torchs_threads
        )
        self._engine = VllmEngine(
            model_path,
            dtype=dtype,
            max_model_len=max_model_len,
            kv_cache_gib=1.0 if kv_cache_gib is None and not on_gpu else kv_cache_gib,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=not on_gpu if enforce_eager is None else enforce_eager,
            can_sleep=self._sleeps,
        )

    @staticmethod
    def check_options(
        *,
        model_path: str = "",
        dtype: str = "float32",
        max_model_len: int | None = None,
        kv_cache_gib: float | None = None,
        gpu_memory_utilization: float = 0.4,
        enforce_eager: bool | None = None,
        sleep: bool | None = None,
    ) -> None:
        """Check what can be checked without a model.

        Raises:
            ValueError: vLLM is not installed, or the first option that cannot be, with the reason.
        """
        if find_spec("vllm") is None:
            raise ValueError(f"vLLM is not installed. {INSTALL}")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype={dtype!r}: wanted one of float32, bfloat16, float16")
        if max_model_len is not None and max_model_len < 2:
            raise ValueError(
                f"max_model_len={max_model_len}: wanted at least 2, a token of a prompt and one of a reply"
            )
        if kv_cache_gib is not None and not 0 < kv_cache_gib < math.inf:
            raise ValueError(f"kv_cache_gib={kv_cache_gib}: wanted more than 0")
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={gpu_memory_utilization}: wanted a share in (0, 1]")
        if sleep and not torch.cuda.is_available():
            raise ValueError("sleep=True: vLLM gives memory back on a GPU only, and there is none; leave it out")

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply to one prompt, in one batch with whatever else is under way.

        A caller that goes away (time-out, cancellation) harms nobody: its request is taken out of the engine.

        Raises:
            SamplerError: the request cannot be met (the message has the numbers), or vLLM failed.
        """
        self._check(prompt_ids, params)
        return await self._asked(prompt_ids, params)

    async def measure(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[float]:
        """log π(output_ids[i] | prompt_ids, output_ids[:i]) for every i, (A,) nats at temperature 1.

        Raises:
            SamplerError: prompt or output are empty or too long together, or vLLM failed.
        """
        self._check(prompt_ids, SamplingParams(max_tokens=len(output_ids)))
        read = (*prompt_ids, *output_ids)
        self._check(read, SamplingParams(max_tokens=1))  # that vLLM samples behind them
        return (await self._asked(read, None)).logprobs[-len(output_ids) :]

    async def _asked(self, prompt_ids: Sequence[int], params: SamplingParams | None) -> Generation:
        """What comes of a request that can be met."""
        loop = asyncio.get_running_loop()
        request = _Request(
            id=str(next(self._numbers)), prompt_ids=tuple(prompt_ids), params=params, reply=loop.create_future()
        )
        self._new.append(request)
        if self._drive is None or self._drive.done() or self._drive.get_loop() is not loop:
            self._drive = loop.create_task(self._serve(loop))
        return await request.reply

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Hand the learner's weights over by name, one tensor at a time, and forget all cached keys and values.

        Raises:
            SamplerError: a name is unknown or missing, a shape differs, or requests are under way.
        """
        waited = self._worker.submit(lambda: None)  # a stretch whose loop died may still be running
        _result(waited, "waiting for the last step before an update of the weights")
        self._settle()
        if self._open or self._new:
            raise SamplerError(
                f"updating the sampler's weights to version {version}: {len(self._open) + len(self._new)} requests are "
                f"under way, and their replies would be of two policies. Await them first."
            )
        self._wake()
        self._engine.abort(self._forget())
        self._engine.load(named_tensors)
        self._version = version

    @property
    def version(self) -> int:
        """The optimiser step whose weights are in use; 0 before the first update."""
        return self._version

    def sleep(self) -> None:
        """Give the GPU's memory back until the next request or update; the weights wait in main memory."""
        if self._sleeps and not self._asleep:
            _result(self._worker.submit(self._engine.sleep), "putting vLLM to sleep")
            self._asleep = True

    def close(self) -> None:
        """Free engine and memory. Requests that come later fail."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._engine.close()

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        check_request(prompt_ids, params, room=self._engine.max_model_len)

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Step until nobody waits. Ends without an await after the last look at the queue."""
        try:
            while self._settle():
                await self._stretch(loop)
        except asyncio.CancelledError:  # with the whole loop: nobody must wait for a reply that will not come
            for request in (*self._open.values(), *self._new):
                if request.reply.get_loop() is loop:
                    request.reply.cancel()
            raise

    def _settle(self) -> bool:
        """Set aside what nobody waits for: given up, or of a loop that died. Whether there is anything left to do."""
        self._gone += [name for name, request in self._open.items() if not _awaited(request)]
        self._open = {name: request for name, request in self._open.items() if _awaited(request)}
        self._new = list(filter(_awaited, self._new))
        return bool(self._open or self._new)

    async def _stretch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the engine work off the loop until something is done or comes in, and hand the replies out."""
        new, self._new = self._new, []
        self._open.update({request.id: request for request in new})
        gone, waiting = self._forget(), tuple(self._open.values())
        try:
            work = loop.run_in_executor(self._worker, self._advance, new, gone, waiting)
            outcomes = await asyncio.wait_for(work, STUCK_SECONDS)
        except Exception as error:  # the boundary to vLLM: every request under way hears of it
            said = str(error) or f"nothing came back within {STUCK_SECONDS:g} seconds"  # a TimeoutError is mute
            failure = f"stepping vLLM with {len(waiting)} requests under way: {type(error).__name__}: {said}"
            outcomes = {request.id: SamplerError(failure) for request in waiting}
            self._gone += outcomes
        for name, outcome in outcomes.items():
            _deliver(self._open.pop(name).reply, outcome)

    def _advance(
        self, new: Sequence[_Request], gone: Sequence[str], waiting: Sequence[_Request]
    ) -> Mapping[str, Outcome]:
        """In the worker thread: take requests in and out, then step until something is done, given up or new."""
        self._wake()
        self._engine.abort(gone)
        outcomes: dict[str, Outcome] = {}
        for request in new:
            try:
                if request.params is None:
                    self._engine.add_reading(request.id, request.prompt_ids)
                else:
                    self._engine.add(request.id, request.prompt_ids, request.params)
            except Exception as error:  # what vLLM does not take ends one request
                outcomes[request.id] = SamplerError(
                    f"handing vLLM a prompt of {len(request.prompt_ids)} tokens: {type(error).__name__}: {error}"
                )
        until = time.monotonic() + STRETCH_SECONDS
        while not outcomes and not self._new and time.monotonic() < until:
            outcomes.update(self._engine.step())
            if any(request.reply.done() for request in waiting):
                break
        return outcomes

    def _forget(self) -> list[str]:
        gone, self._gone = self._gone, []
        return gone

    def _wake(self) -> None:
        if self._asleep:
            self._engine.wake()
            self._asleep = False


def _awaited(request: _Request) -> bool:
    """Whether somebody still waits for the reply: it was not given up, and its loop runs."""
    return not request.reply.done() and request.reply.get_loop().is_running()


def _deliver(reply: asyncio.Future[Generation], outcome: Outcome) -> None:
    if reply.done():
        return
    if isinstance(outcome, SamplerError):
        reply.set_exception(outcome)
    else:
        reply.set_result(outcome)


def _result(work: Future[None], doing: str) -> None:
    """Wait for the worker thread, but not for ever."""
    try:
        work.result(timeout=STUCK_SECONDS)
    except TimeoutError as error:
        raise SamplerError(
            f"{doing}: vLLM did not come to an end within {STUCK_SECONDS:g} seconds. It hangs: end the process and "
            f"resume the run."
        ) from error


def _take_torchs_threads() -> None:
    """Give this thread the number that torch computes with: OpenMP keeps one for each; vLLM asks before torch."""
    torch.set_num_threads(torch.get_num_threads())
