"""Continuous batching: replies join and leave a model's batch between forward passes.

A pass takes the next token of every reply that decodes and the prompts of those that joined. A reply that is done
leaves at once; what its slot holds is used again by its trajectory's next prompt. Equal prompts, such as the first ones
of a group, are computed once: the other replies wait and copy the keys and values. Independent of queues, event loops
and threads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.samplers.packed_attention import NAME, Chunk, Pass, Slots
from condensegrpo.samplers.picking import Decode, DrawnReply, extend, finishes
from condensegrpo.samplers.seeing import SeenPrompt, Sight

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

    prompt: tuple[int, ...]
    abandoned: Callable[[], bool]  # once true, it ends as ``FinishReason.ABORT``
    slot: int
    filled: int  # tokens of prompt and output whose keys and values are in the slot
    key: tuple[int, ...]  # the prompt, in which other pictures are other ids
    seen: SeenPrompt | None  # its pictures; None: it shows none
    leader: "BatchRow | None"  # with the same prompt, whose keys and values it waits for; None: it computes its own

    def pending(self, most: int) -> Chunk:
        """The next tokens to compute."""
        known = len(self.prompt)
        ids = self.prompt[self.filled : min(known, self.filled + most)] if self.filled < known else self.output[-1:]
        return Chunk(self.slot, self.filled, ids)


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
            if reply.filled < len(reply.prompt) and left <= 0:
                continue
            chunk = reply.pending(left)
            if reply.filled < len(reply.prompt):
                left -= len(chunk.ids)
            chunked.append((reply, chunk))
        return chunked

    def _forward(self, chunked: Sequence[tuple[BatchRow, Chunk]]) -> torch.Tensor:
        """The logits behind the last token of every chunk (B, V)."""
        chunks = [chunk for _, chunk in chunked]
        packed = Pass.of(chunks, self._slots, device=self._model.device, heads=self._heads)
        self.passes += 1
        if self._sight is not None:
            return self._sight.forward(packed, [(reply.seen, chunk) for reply, chunk in chunked])
        logits: torch.Tensor = self._model(
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
