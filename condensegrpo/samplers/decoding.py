"""Draws the replies of a model: by continuous batching, or for models that cannot in padded batches.

``ContinuousBatch``: replies join and leave the batch between forward passes. A pass takes the next token of every reply
that decodes and the prompts of those that joined. A reply that is done leaves at once; what its slot holds is used
again by its trajectory's next prompt. Equal prompts, such as the first ones of a group, are computed once: the other
replies wait and copy the keys and values. Independent of queues, event loops and threads.

``PaddedBatch`` draws with transformers' ``generate``: a batch takes as long as its longest reply. Every row has its own
temperature, stops, length and random stream, so a reply does not depend on its batch (up to rounding: a padded row's
logits differ in the last bits).

Legend: _B rows of the batch, _P the longest prompt, _V vocabulary.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.samplers.packed_attention import NAME, ROWS, Chunk, Pass, Slots, up
from condensegrpo.samplers.seeing import SeenPrompt, Sight

Decode = Callable[[list[list[int]]], list[str]]  # rows of token ids → their texts, special tokens included
R = TypeVar("R", bound="DrawnReply")


@dataclass(slots=True, kw_only=True, eq=False)
class DrawnReply:
    """A reply under way."""

    prompt: tuple[int, ...]
    params: SamplingParams
    abandoned: Callable[[], bool]  # once true, it ends as ``FinishReason.ABORT``
    # random.Random keeps all bits of the seed (a torch generator keeps 32) and its numbers never change
    uniforms: random.Random = field(init=False)
    # last tokens that contain a stop string which the last one completes: each is at least a byte
    tail: int = field(init=False)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the output, nats

    def __post_init__(self) -> None:
        self.uniforms = random.Random(self.params.seed)
        self.tail = max((len(text.encode()) for text in self.params.stop_strings), default=0)

    def generation(self, finish: FinishReason) -> Generation:
        """The reply as it is now."""
        return Generation(token_ids=tuple(self.output), logprobs=tuple(self.logprobs), finish=finish)


def extend(replies: Mapping[int, DrawnReply], logits_BV: Tensor) -> None:
    """Draw the next token of every reply, from its row of the logits."""
    # elementwise functions may round the rest of a tensor that fills no vector in another way: keep to whole rows
    more = up(len(replies), ROWS) - len(replies)
    uniforms = [[reply.uniforms.random()] for reply in replies.values()] + [[0.0]] * more
    temperatures = [[reply.params.temperature] for reply in replies.values()] + [[1.0]] * more
    picked = pick(
        logits_BV[[*replies, *[0] * more]],
        logits_BV.new_tensor(uniforms, dtype=torch.float64),
        logits_BV.new_tensor(temperatures, dtype=torch.float32),
    )
    tokens, logprobs = (column[: len(replies), 0].tolist() for column in picked)
    if not all(map(math.isfinite, logprobs)):
        raise SamplerError.not_numbers(f"{len(replies)} replies")
    for reply, token, logprob in zip(replies.values(), tokens, logprobs, strict=True):
        reply.output.append(token)
        reply.logprobs.append(logprob)


def finishes(replies: Sequence[R], decode: Decode) -> dict[R, FinishReason]:
    """The replies that the token just drawn ends; ``decode`` is only called for stop strings."""
    stopping = [reply for reply in replies if reply.output[-1] in reply.params.stop_ids]
    if with_strings := [reply for reply in replies if reply.tail]:
        texts = decode([reply.output[-reply.tail :] for reply in with_strings])
        pairs = zip(with_strings, texts, strict=True)
        stopping += [reply for reply, text in pairs if any(stop in text for stop in reply.params.stop_strings)]
    full = [reply for reply in replies if len(reply.output) >= reply.params.max_tokens]
    return dict.fromkeys(full, FinishReason.LENGTH) | dict.fromkeys(stopping, FinishReason.STOP)


def pick(logits_BV: Tensor, uniform_B1: Tensor, temperature_B1: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of every row, and its log-probability.

    token = min {v : CDF_v > u·CDF_V},  CDF = cumulative sum of softmax(logits/T)

    This inverts the distribution function: one uniform per token, and no token of probability zero is ever drawn. Rows
    do not depend on each other.

    Args:
        logits_BV: the model's, of any floating type.
        uniform_B1: float64, in [0, 1).
        temperature_B1: 0 is greedy.

    Returns:
        Tokens (B, 1), and log_softmax(logits/T)[token] (B, 1) in fp32, nats; at T = 1 for greedy rows. Where logits are
        not numbers the log-probability is not finite.
    """
    greedy_B1 = temperature_B1 == 0
    logp_BV = torch.log_softmax(logits_BV.float() / torch.where(greedy_B1, 1.0, temperature_B1), dim=-1)
    cdf_BV = logp_BV.double().exp_().cumsum(dim=-1)
    total_B1 = cdf_BV[:, -1:]
    below_total_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))  # u·total may round up to the total
    target_B1 = torch.minimum(uniform_B1 * total_B1, below_total_B1)
    drawn_B1 = torch.searchsorted(cdf_BV, target_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)  # NaN: past it
    token_B1 = torch.where(greedy_B1, logp_BV.argmax(dim=-1, keepdim=True), drawn_B1) if greedy_B1.any() else drawn_B1
    return token_B1, logp_BV.gather(1, token_B1)


PAD = 0  # any id of the vocabulary: the mask alone says where prompts are padded, so pad == eos is harmless


class PaddedBatch:
    """Replies that join and are drawn by one call of transformers' ``generate``."""

    def __init__(self, model: Any, *, decode: Decode) -> None:  # noqa: ANN401  transformers' classes are untyped
        """Use a causal language model in eval mode whose ``generation_config`` is blank."""
        self._model, self._decode = model, decode
        self.replies: list[DrawnReply] = []

    def join(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        *,
        abandoned: Callable[[], bool],
        seen: SeenPrompt | None = None,
    ) -> DrawnReply:
        """Begin a reply; its prompt shows no pictures."""
        self.replies.append(DrawnReply(prompt=prompt, params=params, abandoned=abandoned))
        return self.replies[-1]

    def step(self) -> list[tuple[DrawnReply, Generation]]:
        """Draw all replies. One that is abandoned ends as ``FinishReason.ABORT``."""
        replies, ended = self.replies, dict[DrawnReply, FinishReason]()
        self.replies = []
        prompts, device = [reply.prompt for reply in replies], self._model.device
        width = max(map(len, prompts))
        ids_BP = torch.tensor([[PAD] * (width - len(ids)) + list(ids) for ids in prompts], device=device)
        mask_BP = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)

        def draw(input_ids: Tensor, scores: Tensor) -> Tensor:
            """The logits of the next token (B, V): 0 for the token drawn and minus infinity for all others."""
            going = {row: reply for row, reply in enumerate(replies) if reply not in ended}
            extend(going, scores)
            ended.update(finishes([*going.values()], self._decode))
            token_B1 = torch.tensor([reply.output[-1:] for reply in replies], device=device)
            return torch.full_like(scores, -torch.inf).scatter_(1, token_B1, 0.0)

        def done(input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
            """(B,) True for the rows that are done."""
            return torch.tensor([reply in ended or reply.abandoned() for reply in replies], device=device)

        self._model.generate(
            ids_BP,
            attention_mask=mask_BP,
            generation_config=GenerationConfig(
                max_new_tokens=max(reply.params.max_tokens for reply in replies),
                do_sample=False,
                use_cache=True,
                pad_token_id=PAD,
            ),
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([done]),
        )
        return [(reply, reply.generation(ended.get(reply, FinishReason.ABORT))) for reply in replies]

    def clear(self) -> None:
        """Drop all replies."""
        self.replies.clear()


PASS_TOKENS = 4096  # of prompts in one pass; longer ones take several
SHARED = 16  # tokens of an equal prompt from which on a reply waits for them; a pass more costs more than fewer tokens
SPARSE = 2  # slots read in place, times those that decode: beyond that, replies move together
SUPPORTED = ("llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")  # compared with plain passes in tests
SEEING = ("qwen2_5_vl_text", "qwen3_vl_text")  # likewise, within a model that sees
ROPE = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on the longest reply of a batch


def supports(model: Any) -> bool:  # noqa: ANN401  transformers' classes are untyped
    """Whether a causal language model can decode packed rows: of a known type, with attention over all tokens alone."""
    config = model.config.get_text_config()
    shape = config.to_dict()
    windowed = shape.get("sliding_window") and shape.get("use_sliding_window", True)
    rope = shape.get("rope_parameters") or {}
    return bool(
        config.model_type in (*SUPPORTED, *SEEING)
        and all(kind == "full_attention" for kind in shape.get("layer_types") or ())
        and not windowed
        and rope.get("rope_type", "default") in ROPE
    )


@dataclass(slots=True, kw_only=True, eq=False)
class BatchRow(DrawnReply):
    """A reply under way, and where its keys and values are."""

    slot: int
    filled: int  # tokens of prompt and output whose keys and values are in the slot
    key: tuple[int, ...]  # the prompt, in which other pictures are other ids
    seen: SeenPrompt | None  # its pictures; None: it shows none
    leader: "BatchRow | None"  # with the same prompt, whose keys and values it waits for; None: it computes its own


class ContinuousBatch:
    """The replies under way and their keys and values."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401  transformers' classes are untyped
        *,
        most: int,
        decode: Decode,
        sight: Sight | None = None,
    ) -> None:
        """Use a model in eval mode; its attention function is replaced by one that falls back to sdpa.

        Args:
            most: replies at the same time, and trajectories whose keys and values are kept.
            decode: only called for stop strings.
            sight: of a model that sees, whose language model it then drives.
        """
        self._model = model
        self._decode = decode
        self._slots = Slots(most=most)
        self._most = most
        self._heads = int(model.config.get_text_config().num_attention_heads)
        self._sight = sight
        self.replies: list[BatchRow] = []
        self._leaders: dict[tuple[int, ...], BatchRow] = {}  # key -> the first of the replies that have it
        self.passes = 0  # forward passes so far
        model.set_attn_implementation(NAME if sight is None else {"text_config": NAME})

    @property
    def room(self) -> int:
        """Replies that can join."""
        return self._most - len(self.replies)

    def join(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        abandoned: Callable[[], bool],
        seen: SeenPrompt | None = None,
    ) -> BatchRow:
        """Begin a reply. There must be room."""
        prompt = tuple(prompt)
        key = prompt if seen is None else seen.key
        slot, kept = self._slots.take(key, params.trajectory)
        reply = BatchRow(
            prompt=prompt,
            params=params,
            abandoned=abandoned,
            slot=slot,
            filled=kept,
            key=key,
            seen=seen,
            leader=self._leaders.get(key) if len(prompt) >= SHARED else None,
        )
        self._leaders.setdefault(key, reply)
        self.replies.append(reply)
        return reply

    @torch.inference_mode()
    def step(self) -> list[tuple[BatchRow, Generation]]:
        """One forward pass. Returns the replies that ended."""
        abandoned = {reply: FinishReason.ABORT for reply in self.replies if reply.abandoned()}
        ended = self._leave(abandoned)
        if not self.replies:
            return ended
        longest = max(len(reply.prompt) + len(reply.output) for reply in self.replies)
        self._slots.reserve(longest, max(len(reply.prompt) + reply.params.max_tokens for reply in self.replies))
        self._close_up()
        self._copy_prompts()
        chunked = self._chunks()
        logits = self._forward(chunked)
        ready = {}  # replies whose tokens are all computed, by row of the logits
        for row, (reply, chunk) in enumerate(chunked):
            reply.filled += len(chunk.ids)
            if reply.filled == len(reply.prompt) + len(reply.output):
                ready[row] = reply
        self._copy_prompts()
        if ready:
            extend(ready, logits)
        return ended + self._leave(finishes([*ready.values()], self._decode))

    def clear(self) -> None:
        """Drop all replies, keys and values."""
        self.replies.clear()
        self._leaders.clear()
        self._slots.clear()

    def _close_up(self) -> None:
        """Move replies to the first slots if few of those that are read decode."""
        span = 1 + max(reply.slot for reply in self.replies)
        if span <= SPARSE * len(self.replies):
            return
        busy = {reply.slot for reply in self.replies}
        free = (slot for slot in range(span) if slot not in busy)
        for reply in sorted(self.replies, key=lambda reply: -reply.slot):
            slot = next(free)
            if slot >= reply.slot:
                return
            self._slots.swap(slot, reply.slot)
            reply.slot = slot

    def _copy_prompts(self) -> None:
        """Give replies the keys and values that their leaders have computed for the same prompt but its last token."""
        for reply in self.replies:
            if reply.leader is None:
                continue
            shared = len(reply.prompt) - 1
            if reply.filled >= shared or self._leaders.get(reply.key) is not reply.leader:  # it has left
                reply.leader = None
            elif reply.leader.filled >= shared:
                self._slots.copy(reply.leader.slot, reply.slot, shared)
                reply.filled, reply.leader = shared, None

    def _chunks(self) -> list[tuple[BatchRow, Chunk]]:
        """The tokens of the next pass: all that decode, and prompts up to a number of tokens."""
        left = PASS_TOKENS
        chunked = []
        for reply in self.replies:
            if reply.leader is not None:
                continue
            if reply.filled >= len(reply.prompt):
                ids: Sequence[int] = reply.output[-1:]
            elif left > 0:
                ids = reply.prompt[reply.filled : reply.filled + left]
                left -= len(ids)
            else:
                continue
            chunked.append((reply, Chunk(reply.slot, reply.filled, ids)))
        return chunked

    def _forward(self, chunked: Sequence[tuple[BatchRow, Chunk]]) -> Tensor:
        """The logits behind the last token of every chunk (B, V)."""
        chunks = [chunk for _, chunk in chunked]
        packed = Pass.of(chunks, self._slots, device=self._model.device, heads=self._heads)
        self.passes += 1
        if self._sight is not None:
            return self._sight.forward(packed, [(reply.seen, chunk) for reply, chunk in chunked])
        logits: Tensor = self._model(
            input_ids=packed.ids,
            position_ids=packed.position,
            # a mask of four dimensions keeps transformers from making one of N × N
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.ids.device),
            use_cache=False,
            logits_to_keep=packed.last,
            packed=packed,
        ).logits[0]
        return logits

    def _leave(self, ends: Mapping[BatchRow, FinishReason]) -> list[tuple[BatchRow, Generation]]:
        """End replies: their slots keep what the next prompts of their trajectories may continue."""
        self.replies = [reply for reply in self.replies if reply not in ends]
        for reply in ends:
            if self._leaders.get(reply.key) is reply:
                del self._leaders[reply.key]
            self._slots.release(reply.slot, (*reply.key, *reply.output)[: reply.filled])
        return [(reply, reply.generation(finish)) for reply, finish in ends.items()]
