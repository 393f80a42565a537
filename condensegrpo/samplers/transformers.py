"""The sampler that needs nothing but transformers: requests that wait at the same time are generated as one batch.

It holds its own copy of the model. Throughput is vLLM's business; this one runs everywhere and is exact.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from condensegrpo.errors import SamplerError
from condensegrpo.protocols import NamedTensors
from condensegrpo.samplers.batch import draw
from condensegrpo.trajectory import Generation, SamplingParams

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_BATCH = 256  # requests generated at once
SETTLE_SECONDS = 0.002  # a batch starts once no request has come for this long; a batch takes far longer than that
SETTLE_ROUNDS = 64  # of the event loop, nor in so many: a busy machine must not decide who shares a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    reply: asyncio.Future[Generation]


class TransformersSampler:
    """Samples with ``AutoModelForCausalLM`` and padded ``generate``.

    The model folder's own generation defaults (top-k, repetition penalty, …) are ignored: log-probabilities are those
    of softmax(logits / temperature), and tokens are drawn from exactly that. One instance serves one event loop at a
    time, and any number of them one after another.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        device: str | None = None,
        max_batch: int = MAX_BATCH,
    ) -> None:
        """Load the model.

        Args:
            model_path: a Hugging Face folder or Hub id.
            device: such as ``cpu`` or ``cuda:1``; by default the GPU if there is one.
            max_batch: most requests that are generated at once; the others wait for the next batch.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r}: wanted one of {', '.join(DTYPES)}")
        if max_batch < 1:
            raise ValueError(f"max_batch={max_batch}: wanted at least 1")
        self._model_path = model_path
        self._max_batch = max_batch
        self._model = _load(model_path, DTYPES[dtype], device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._version = 0
        self._waiting: list[_Request] = []
        self._drain: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="sampler"
        )  # one: the model is not re-entrant
        self._weights = threading.Lock()  # held while the weights are read or written

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply to one prompt, generated together with whatever else waits.

        A caller that goes away (time-out, cancellation) harms nobody: its row is thrown away.

        Raises:
            SamplerError: the request cannot be met (the message has the numbers), or ``generate`` failed.
        """
        self._check(prompt_ids, params)
        loop = asyncio.get_running_loop()
        request = _Request(prompt_ids=tuple(prompt_ids), params=params, reply=loop.create_future())
        self._waiting.append(request)
        if self._drain is None or self._drain.done() or self._drain.get_loop() is not loop:
            self._drain = loop.create_task(self._serve(loop))
        return await request.reply

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Copy the learner's weights by name, in place, one tensor at a time. Waits for a batch under way to end.

        Raises:
            SamplerError: a name is unknown or missing, or a shape differs. What came before it has been copied.
        """
        wanted: dict[str, Tensor] = self._model.state_dict()
        taken: set[str] = set()
        with self._weights, torch.no_grad():
            for name, tensor in named_tensors:
                _check_tensor(name, tensor, wanted)
                wanted[name].copy_(tensor)
                taken.add(name)
        _check_complete(taken, dict(self._model.named_parameters(remove_duplicate=False)))
        self._version = version

    @property
    def version(self) -> int:
        """The optimiser step whose weights are in use; 0 before the first update."""
        return self._version

    def close(self) -> None:
        """Free the weights. Requests that come later fail."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._model.to("meta")

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        length, room = len(prompt_ids), self._positions
        if not length or params.max_tokens < 1 or params.temperature < 0:
            raise SamplerError(
                f"sampling a reply: found a prompt of {length} tokens, max_tokens={params.max_tokens} and "
                f"temperature={params.temperature}; wanted at least one token of each and a temperature of at least 0."
            )
        if room is not None and length + params.max_tokens > room:
            raise SamplerError(
                f"sampling a reply: a prompt of {length} tokens and max_tokens={params.max_tokens} make "
                f"{length + params.max_tokens}, and {self._model_path} has {room} positions. Lower "
                f"rollout.max_context_tokens or rollout.max_output_tokens, or take a model with a longer context."
            )

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Generate batch after batch until nobody waits. Ends without an await after the last look at the queue."""
        batch: list[_Request] = []
        try:
            while self._waiting:
                await self._settle()
                batch = self._take(loop)
                if batch:
                    await self._answer(batch, loop)
        except asyncio.CancelledError:  # with the whole loop: nobody must wait for a reply that will not come
            for request in (*batch, *self._take(loop)):
                request.reply.cancel()
            raise

    async def _settle(self) -> None:
        """Wait until the queue stops growing, so that all trajectories that are ready share a batch."""
        size = 0
        while size < len(self._waiting) < self._max_batch:
            size = len(self._waiting)
            await asyncio.sleep(SETTLE_SECONDS)
            for _ in range(SETTLE_ROUNDS):
                await asyncio.sleep(0)

    def _take(self, loop: asyncio.AbstractEventLoop) -> list[_Request]:
        """The next batch: the oldest requests first, without those that were given up or belong to a loop that died."""
        ready = [one for one in self._waiting if not one.reply.done() and one.reply.get_loop() is loop]
        self._waiting = ready[self._max_batch :]
        return ready[: self._max_batch]

    async def _answer(self, batch: Sequence[_Request], loop: asyncio.AbstractEventLoop) -> None:
        """Generate one batch off the loop and hand the replies out."""
        try:
            replies = await loop.run_in_executor(self._worker, self._draw, batch)
        except Exception as error:  # the boundary to the model: every request of the batch hears of it
            for request in batch:
                if not request.reply.done():
                    request.reply.set_exception(
                        error
                        if isinstance(error, SamplerError)
                        else SamplerError(
                            f"generating a batch of {len(batch)} replies: {type(error).__name__}: {error}"
                        )
                    )
            return
        for request, reply in zip(batch, replies, strict=True):
            if not request.reply.done():
                request.reply.set_result(reply)

    def _draw(self, batch: Sequence[_Request]) -> tuple[Generation, ...]:
        """In the worker thread."""
        with self._weights:
            return draw(
                self._model,
                [request.prompt_ids for request in batch],
                [request.params for request in batch],
                decode=self._decode,
                abandoned=lambda: all(request.reply.done() for request in batch),
            )

    def _decode(self, rows: list[list[int]]) -> list[str]:
        texts: list[str] = self._tokenizer.batch_decode(
            rows, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return texts

    @cached_property
    def _tokenizer(self) -> Any:  # noqa: ANN401  transformers' classes are untyped
        return AutoTokenizer.from_pretrained(self._model_path)  # only stop strings need one

    @cached_property
    def _positions(self) -> int | None:
        """Positions that the model was made for; None: it does not say."""
        known: int | None = self._model.config.get_text_config().to_dict().get("max_position_embeddings")
        return known


def _load(path: str, dtype: torch.dtype, device: str) -> Any:  # noqa: ANN401  transformers' classes are untyped
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise SamplerError(
            f"loading the sampler's model from {path!r}: {error} Wanted a Hugging Face folder or Hub id of a causal "
            f"language model."
        ) from error
    model.generation_config = GenerationConfig()  # the folder's defaults would bend the distribution unseen
    return model.to(device).eval().requires_grad_(False)


def _check_tensor(name: str, tensor: Tensor, wanted: dict[str, Tensor]) -> None:
    if name not in wanted:
        raise SamplerError(
            f"updating the sampler's weights: {name!r} is no weight of its model, which has {len(wanted)} from "
            f"{min(wanted)!r} to {max(wanted)!r}. Learner and sampler must load the same architecture."
        )
    if tensor.shape != wanted[name].shape:
        raise SamplerError(
            f"updating the sampler's weights: {name!r} has the shape {tuple(tensor.shape)}, the sampler's model wants "
            f"{tuple(wanted[name].shape)}. Gather sharded weights before handing them over."
        )


def _check_complete(taken: set[str], wanted: dict[str, Tensor]) -> None:
    """Every parameter was given, or is tied to one that was."""
    filled = {tensor.data_ptr() for name, tensor in wanted.items() if name in taken}
    missing = sorted(name for name, tensor in wanted.items() if tensor.data_ptr() not in filled)
    if missing:
        raise SamplerError(
            f"updating the sampler's weights: {len(missing)} of {len(wanted)} were not given, the first is "
            f"{missing[0]!r}. The sampler now holds old and new weights: hand over all of them."
        )
