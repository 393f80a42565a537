"""The sampler that needs nothing but transformers: replies join and leave its batch between forward passes.

It has a copy of the model. It runs everywhere and is exact; for throughput use vLLM.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch
from annotated_types import Ge
from safetensors import SafetensorError
from torch import Tensor

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols.sampler import AttentionQuery, NamedTensors, Sampler, TokenAttention
from condensegrpo.core.request_queue import Driver, Outcomes, QueuedRequest, RequestQueue
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.learner.devices import DTYPES, empty_cache, on_this_device, synchronize, use_new_stream
from condensegrpo.learner.model_folder import auto_class, tokenizer_of, trained_steps
from condensegrpo.learner.settings import DtypeName
from condensegrpo.samplers.checks import UpdateCheck, check_request
from condensegrpo.storage.media import MediaFolder
from condensegrpo.vision.processor import load_picture_processor

if TYPE_CHECKING:
    from condensegrpo.samplers.decoding import DrawnReply
    from condensegrpo.samplers.seeing import SeenPrompt

V = TypeVar("V")
R = TypeVar("R")
MAX_BATCH = 256  # replies under way at once, and trajectories whose keys and values are kept
MAX_TOKENS = 32768  # of prompts, padded to the longest, that are processed at once

_Prompt = tuple[tuple[int, ...], SamplingParams, "SeenPrompt | None"]
_Query = tuple[AttentionQuery, "SeenPrompt | None"]
_Pair = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and output ids


class TransformersSampler(Sampler):
    """Samples with transformers' model of the folder, each reply for as long as it takes (decoding.py).

    Keys and values of a trajectory's last reply are kept until new weights come: a prompt that continues it computes
    only what is new. In fp32 on a CPU (MKL) a reply has the same bits whatever else is sampled and whenever; elsewhere
    it is the same up to rounding. Models with other states than keys and values of all tokens are generated in padded
    batches (``PaddedBatch``), where a reply is also the same up to rounding.

    The model folder's own generation defaults (top-k, repetition penalty, …) are ignored: log-probabilities are those
    of softmax(logits / temperature), the distribution that tokens are drawn from. One instance serves one event loop at
    a time, and any number of them one after another.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: DtypeName = "float32",
        device: str | None = None,
        max_batch: Annotated[int, Ge(1)] = MAX_BATCH,
        media: MediaFolder | None = None,
    ) -> None:
        """Load the model.

        Args:
            model_path: a Hugging Face folder or Hub id.
            device: such as ``cpu`` or ``cuda:1``; by default the GPU if there is one.
            max_batch: most replies under way at once; further requests wait until one ends.
            media: where the pictures of prompts are; None: prompts show none.
        """
        self._model_path = model_path
        self._model = _load(model_path, DTYPES[dtype], device or ("cuda" if torch.cuda.is_available() else "cpu"))
        text_config = self._model.config.get_text_config().to_dict()
        self._positions: int | None = text_config.get("max_position_embeddings")  # None: not in its configuration
        self.version = trained_steps(model_path) or 0  # the optimiser step whose weights are in use
        # one thread: the model is not re-entrant
        use_device = on_this_device()

        def begin() -> None:
            use_device()
            use_new_stream()  # sampling ahead does not wait for the learner's work, nor that for it

        self._worker = ThreadPoolExecutor(1, "sampler", initializer=begin)
        batches = partial(RequestQueue, worker=self._worker, most=max_batch, settle=True)
        self._measured: RequestQueue[_Pair, Sequence[float]] = batches(
            drive=_in_batches(self._measured_batch), failure=partial(_failure, "measuring a batch of {} replies")
        )
        self._attention: RequestQueue[_Query, TokenAttention] = batches(
            drive=_in_batches(self._attended_batch),
            failure=partial(_failure, "capturing attention in a batch of {} queries"),
        )
        from condensegrpo.samplers.decoding import ContinuousBatch, PaddedBatch, supports  # import transformers
        from condensegrpo.samplers.seeing import Sight  # likewise

        self._continuous = supports(self._model)
        processor = load_picture_processor(model_path, media) if media is not None and self._continuous else None
        self._sight = None if processor is None else Sight(self._model, processor)  # None: there are no pictures
        self._decoder: ContinuousBatch | PaddedBatch = PaddedBatch(self._model, decode=self._decode)
        if self._continuous:
            self._decoder = ContinuousBatch(self._model, most=max_batch, decode=self._decode, sight=self._sight)
        self._rows: dict[DrawnReply, QueuedRequest[_Prompt, Generation]] = {}  # of the decoder
        self._replies: RequestQueue[_Prompt, Generation] = batches(
            drive=self._step,
            settle=not self._continuous,
            failure=partial(_failure, "generating a batch of {} replies"),
        )

    def describe(self) -> str:
        """How replies are sampled, which depends on the model."""
        if not self._continuous:
            kind = self._model.config.model_type
            return f"transformers: padded batches, as keys and values of models of type {kind!r} are not kept"
        return "transformers: replies join and leave the batch between tokens; keys and values are kept between turns"

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply to one prompt, sampled beside the other requests.

        Cancelling a caller affects no other request: its reply is discarded.
        """
        self._check(prompt_ids, params)
        ids = tuple(prompt_ids)
        return await self._replies.submit((ids, params, await self._seen(ids, params.media)))

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[float]:
        """log π(output_ids[i] | prompt_ids, output_ids[:i]) for every i, (A,) nats at temperature 1."""
        self._check(prompt_ids, SamplingParams(max_tokens=len(output_ids)))
        return await self._measured.submit((tuple(prompt_ids), tuple(output_ids)))

    async def attend(self, query: AttentionQuery) -> TokenAttention:
        """The attention of one query, under the weights in use; see ``attention.capture``."""
        self._check(
            query.prompt_ids, SamplingParams(max_tokens=max(len(query.question_ids), len(query.calibration_ids)))
        )
        return await self._attention.submit((query, await self._seen(query.prompt_ids, query.media)))

    def update(self, named_tensors: NamedTensors, version: int) -> None:
        """Copy the learner's weights by name, in place, one tensor at a time, and drop all keys and values.

        Waits until no request is under way.
        """
        weights: dict[str, Tensor] = self._model.state_dict()
        check = UpdateCheck.of(self._model)
        with self._paused(), torch.no_grad():
            for name, tensor in named_tensors:
                if check.takes(name, tensor):
                    weights[name].copy_(tensor)
            synchronize()  # they were copied on the caller's stream
        check.complete()
        self.version = version

    def sleep(self, *, keep_weights: bool) -> None:
        """Free the keys and values kept for the next turns, once no request is under way. Weights stay in any case."""
        with self._paused():
            empty_cache()

    def close(self) -> None:
        """Free weights, keys and values. Later requests fail."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        for queue in (self._replies, self._measured, self._attention):
            queue.close()
        self._free()
        self._model.to("meta")

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Keys and values are free and nothing is computed, once no request is under way."""
        with self._replies.paused(), self._measured.paused(), self._attention.paused():
            self._free()
            yield

    async def _seen(self, ids: tuple[int, ...], media: tuple[str, ...]) -> "SeenPrompt | None":
        """The pictures of a prompt, read and prepared in a thread."""
        if not media:
            return None
        if self._sight is None:
            raise SamplerError(
                f"sampling a reply to a prompt with pictures: models of type {self._model.config.model_type!r} are not "
                f"shown any, or the sampler was given no folder of media. docs/how-to/train-with-pictures.md lists the "
                f"models that see."
            )
        return await asyncio.to_thread(self._sight.prompt, ids, media)

    def _free(self) -> None:
        """Drop replies under way, all keys and values, and the features of all pictures."""
        self._rows.clear()
        if self._sight is not None:
            self._sight.clear()
        self._decoder.clear()

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        limit = f"{self._model_path} has {self._positions} positions"
        check_request(prompt_ids, params, room=self._positions, limit=limit, longer="use a longer model")

    def _step(self, requests: Sequence[QueuedRequest[_Prompt, Generation]]) -> Outcomes[_Prompt, Generation]:
        """Driver: one forward pass, which the requests join, or one padded batch."""
        try:
            for request in requests:
                prompt, params, seen = request.value
                row = self._decoder.join(prompt, params, abandoned=request.abandoned, seen=seen)
                self._rows[row] = request
            return [(self._rows.pop(row), generation) for row, generation in self._decoder.step()]
        except Exception:
            self._free()
            raise

    def _measured_batch(self, pairs: Sequence[_Pair]) -> list[Sequence[float]]:
        """Log-probabilities, in passes that fit."""
        batches = padded_batches([len(prompt) + len(output) for prompt, output in pairs], MAX_TOKENS)
        return [row for part in batches for row in logprobs_of(self._model, pairs[part])]

    def _attended_batch(self, queries: Sequence[_Query]) -> list[TokenAttention]:
        """Attention, in passes that fit. Queries with the same layers share a pass."""
        from condensegrpo.attention.capture import attend

        def attended(queries: Sequence[_Query]) -> Sequence[TokenAttention]:
            token_queries, prompts = zip(*queries, strict=True)
            sight = self._sight
            if sight is None:
                return attend(self._model, token_queries)
            return attend(
                self._model,
                token_queries,
                lambda ids, position: sight.inputs(ids, position, [(seen, 0, ids.shape[1]) for seen in prompts]),
            )

        return [
            attention
            for _, alike in groupby(queries, key=lambda query: query[0].layers)
            for same in [list(alike)]
            for part in padded_batches([query.length for query, _ in same], MAX_TOKENS)
            for attention in attended(same[part])
        ]

    def _decode(self, rows: list[list[int]]) -> list[str]:
        texts: list[str] = self._tokenizer.batch_decode(
            rows, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return texts

    @cached_property
    def _tokenizer(self) -> Any:  # noqa: ANN401  transformers' classes are untyped
        return tokenizer_of(self._model_path)  # only stop strings need one


def _in_batches(compute: Callable[[Sequence[V]], Sequence[R]]) -> Driver[V, R]:
    """A driver that computes all requests of a call at once."""
    return lambda batch: zip(batch, compute([request.value for request in batch]), strict=True)


def _load(path: str, dtype: torch.dtype, device: str) -> Any:  # noqa: ANN401  transformers' classes are untyped
    from transformers import AutoConfig, GenerationConfig

    try:
        model: Any = auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise SamplerError.no_model(path, error) from error
    model.generation_config = GenerationConfig()  # the folder's defaults would change the distribution
    return model.to(device).eval().requires_grad_(False)


def _failure(doing: str, error: Exception, requests: int) -> SamplerError:
    """The error of requests that a failing batch contained.

    Args:
        doing: what the batch was for, with a place for the number of requests.
    """
    if isinstance(error, SamplerError):
        return error
    return SamplerError(f"{doing.format(requests)}: {type(error).__name__}: {error}")


PAD = 0  # any id of the vocabulary: the mask alone says where rows are padded


@torch.no_grad()
def logprobs_of(
    model: Any,  # noqa: ANN401  transformers' classes are untyped
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[tuple[float, ...]]:
    """log π(o_i | c, o_0 … o_(i−1)) of every reply token, in nats at temperature 1, computed in fp32.

    Rows are padded on the left, so that all replies end at the last position and logits are computed for them alone.

    Args:
        pairs: (prompt ids, reply ids), neither empty.
    """
    rows = [(*prompt, *reply) for prompt, reply in pairs]
    longest, most = max(map(len, rows)), max(len(reply) for _, reply in pairs)
    ids_BL = torch.tensor([[PAD] * (longest - len(row)) + list(row) for row in rows], device=model.device)
    mask_BL = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    logits_BAV = model(
        input_ids=ids_BL,
        attention_mask=mask_BL,
        position_ids=(mask_BL.cumsum(dim=1) - 1).clamp(min=0),
        logits_to_keep=most + 1,
        use_cache=False,
    ).logits[:, -most - 1 : -1]
    logp_BA = logits_BAV.float().log_softmax(dim=-1).gather(2, ids_BL[:, -most:, None])[..., 0]
    return [tuple(row[most - len(reply) :]) for row, (_, reply) in zip(logp_BA.tolist(), pairs, strict=True)]


def padded_batches(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Consecutive rows whose number times their longest is at most ``most``; one row alone may be longer.

    Lengths 3 4 9 2 and at most 9 ─▶ 0:2, 2:3, 3:4
    """
    start = longest = 0
    for row, length in enumerate(lengths):
        if row > start and max(longest, length) * (row - start + 1) > most:
            yield slice(start, row)
            start, longest = row, 0
        longest = max(longest, length)
    if lengths:
        yield slice(start, len(lengths))
