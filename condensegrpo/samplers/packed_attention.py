"""One forward pass over tokens of many replies, packed into one row, whose keys and values are in slots.

    tokens   a9 b3 c17 | d0 d1 d2 d3          a, b and c decode, d joins with its prompt
    slots    0: a0…a9   1: —   2: b0…b3   3: c0…c17   4: d0…d3

A token attends to the slot of its reply, up to itself; everything else in the model works on each token alone.

Slots hold keys and values, for every layer (slots, heads, length, size), zeros where unused. They know which tokens
they hold and whose they are. A trajectory that is between two replies keeps its slot, so that a prompt that continues
the last one is not computed again; the slot that was idle the longest is given away first.

**Batch invariance.** In fp32 on a CPU a token's result has the same bits whatever else is in the pass and wherever its
slot is, and keys and values are the same whether a prompt is computed at once, in parts or token by token. That holds
because every query is a product of one vector and one matrix, also within prompts; vectors and matrices are aligned
to 64 bytes and padded to multiples of 16, as MKL sums in another order otherwise; and a pass has a multiple of 8 rows,
as MKL multiplies fewer rows in another order. Tested with MKL and 1 and 2 threads (tests/test_batch_invariance.py);
other types and devices use fused attention and are equal up to rounding, as other BLAS libraries may be.

Legend: N tokens of a pass, S rows computed together, P tokens of a chunk, L positions read, h query heads, g key heads,
d their size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from condensegrpo.core.shared_sequence import common_prefix

NAME = "sdpa_with_slots"  # of this attention function in transformers' registry
ROWS = 8  # tokens and logits of a pass are padded to multiples
BLOCK = 256  # queries of a prompt computed together
TOGETHER = 1 << 22  # most elements of a mask of prompts that are computed together
ALIGNED = 16  # floats of 64 bytes: lengths and head sizes are padded to multiples, see **Batch invariance**
SHORTEST = 2 * ALIGNED  # positions of a slot
LONGER = 1.25  # factor by which the length of slots grows at least, as far as replies can need it
MORE = 1 / 16  # of the slots are added at least; few, as nothing says how many trajectories will come


def up(number: int, multiple: int) -> int:
    """The next multiple: up(17, 16) ─▶ 32."""
    return -(-number // multiple) * multiple


@dataclass(slots=True, kw_only=True)
class Slot:
    """The content of a slot."""

    ids: Sequence[int] = ()  # tokens whose keys and values it holds, from position 0 on
    trajectory: str = ""  # whose they are; "": nobody's
    used: int = 0  # when it was released last
    busy: bool = False  # its reply is under way


@dataclass(slots=True, kw_only=True)
class Slots:
    """At most ``most`` slots; memory grows as it is needed."""

    most: int
    slots: list[Slot] = field(default_factory=list)
    length: int = 0  # positions of each slot
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # keys and values
    _clock: int = 0

    def take(self, prompt: Sequence[int], trajectory: str) -> tuple[int, int]:
        """A slot for a prompt, and how many of its first tokens the slot already holds; the last one never counts.

        There must be fewer than ``most`` busy ones.
        """
        slots = enumerate(self.slots) if trajectory else ()
        idle = next((index for index, slot in slots if slot.trajectory == trajectory and not slot.busy), None)
        index = self._unused() if idle is None else idle
        slot = self.slots[index]
        kept = 0 if idle is None else common_prefix(slot.ids, prompt[:-1])
        slot.busy, slot.trajectory = True, trajectory
        return index, kept

    def release(self, index: int, ids: Sequence[int]) -> None:
        """End the use of a slot, which holds ``ids``: they stay for its trajectory's next prompt, if it has one."""
        self._clock += 1
        slot = self.slots[index]
        slot.busy, slot.used, slot.ids = False, self._clock, ids if slot.trajectory else ()

    def reserve(self, length: int, limit: int) -> None:
        """Make room for ``length`` positions in every slot, one layer after another.

        Args:
            limit: most positions that the replies under way can need.
        """
        if length > self.length:
            self.length = up(max(length, SHORTEST, min(int(self.length * LONGER), limit)), ALIGNED)
        for layer, (keys, values) in self.layers.items():
            if keys.shape[2] < self.length or keys.shape[0] < len(self.slots):
                self.layers[layer] = (self._grown(keys), self._grown(values))

    def of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer; the first call shows what they look like: (·, heads, ·, size)."""
        if layer not in self.layers:
            self.layers[layer] = (self._new(key), self._new(value))
        return self.layers[layer]

    def swap(self, index: int, other: int) -> None:
        """Exchange two slots and what they hold."""
        self.slots[index], self.slots[other] = self.slots[other], self.slots[index]
        for tensors in self.layers.values():
            for tensor in tensors:
                tensor[[index, other]] = tensor[[other, index]]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a slot to another one."""
        for tensors in self.layers.values():
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self) -> None:
        """Free everything. No slot may be busy."""
        self.slots.clear()
        self.layers.clear()
        self.length = 0

    def _unused(self) -> int:
        """The first free slot, else a new one, else that of the trajectory that was idle the longest."""
        slots = enumerate(self.slots)
        free = next((index for index, slot in slots if not slot.busy and not slot.trajectory), None)
        if free is None and len(self.slots) < self.most:
            more = min(self.most, max(len(self.slots) + 1, int(len(self.slots) * (1 + MORE))))
            free = len(self.slots)
            self.slots.extend(Slot() for _ in range(free, more))
        if free is None:
            idle = [index for index, slot in enumerate(self.slots) if not slot.busy]
            free = min(idle, key=lambda index: self.slots[index].used)
        return free

    def _new(self, like: Tensor) -> Tensor:
        return like.new_zeros(len(self.slots), like.shape[1], self.length, up(like.shape[-1], ALIGNED))

    def _grown(self, tensor: Tensor) -> Tensor:
        grown = tensor.new_zeros(len(self.slots), tensor.shape[1], self.length, tensor.shape[-1])
        grown[: tensor.shape[0], :, : tensor.shape[2]] = tensor
        return grown


class Chunk(NamedTuple):
    """Consecutive tokens of one reply or its prompt."""

    slot: int
    start: int  # position of the first token
    ids: Sequence[int]


class Rows(NamedTuple):
    """Queries of different slots, computed together step by step: one token of every row at a time."""

    slots: Tensor | slice  # (S,) a slice is read in place
    tokens: Tensor  # (P, S) where the tokens are in the pass; N: nowhere, its result is not used
    mask: Tensor  # (P, S, 1, L) 0 where a token attends, minus infinity elsewhere


class Block(NamedTuple):
    """Queries of one slot."""

    slot: int
    first: int  # where they are in the pass
    mask: Tensor  # (P, 1, L)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The tokens of one forward pass and how their attention is computed."""

    slots: Slots
    ids: Tensor  # (1, N)
    position: Tensor  # (1, N)
    slot: Tensor  # of every token but the padding after them
    last: Tensor  # the last token of every chunk, padded to a multiple of 8
    rows: tuple[Rows, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, chunks: Sequence[Chunk], slots: Slots, *, device: torch.device, heads: int) -> Self:
        """A pass over chunks of different slots, which have room for them.

        Args:
            heads: h, of the queries.
        """
        ends, ids, position, slot = [0], list[int](), list[int](), list[int]()
        for chunk in chunks:
            ids.extend(chunk.ids)
            position.extend(range(chunk.start, chunk.start + len(chunk.ids)))
            slot.extend([chunk.slot] * len(chunk.ids))
            ends.append(len(ids))
        indexed = list(zip(ends, chunks, strict=False))
        padding = [0] * (up(len(ids), ROWS) - len(ids))
        last = [end - 1 for end in ends[1:]]
        single = [each for each in indexed if len(each[1].ids) == 1]
        longer = [each for each in indexed if len(each[1].ids) > 1]
        nowhere = len(ids) + len(padding)
        rows = [_in_place(single, nowhere, device)] if single else []
        if longer and _together(longer, heads):
            rows.append(_gathered(longer, nowhere, device))
            longer = []
        return cls(
            slots=slots,
            ids=torch.tensor([ids + padding], device=device),
            position=torch.tensor([position + padding], device=device),
            slot=torch.tensor(slot, device=device),
            last=torch.tensor(last + [0] * (up(len(last), ROWS) - len(last)), device=device),
            rows=tuple(rows),
            blocks=tuple(block for each in longer for block in _blocks(*each, device)),
        )


def _causal_mask(position: Tensor, device: torch.device) -> Tensor:
    """(…, L), of positions in main memory: 0 up to a position, minus infinity after it."""
    length = up(max(int(position.max()) + 1, SHORTEST), ALIGNED)  # torch computes tiny products without BLAS
    mask = torch.zeros(*position.shape, length)
    return mask.masked_fill_(torch.arange(length) > position[..., None], -torch.inf).to(device)


def _in_place(chunks: Sequence[tuple[int, Chunk]], nowhere: int, device: torch.device) -> Rows:
    """Single tokens: all slots up to their last one."""
    span = 1 + max(chunk.slot for _, chunk in chunks)
    tokens, position = [nowhere] * span, [0] * span
    for first, chunk in chunks:
        tokens[chunk.slot], position[chunk.slot] = first, chunk.start
    mask = _causal_mask(torch.tensor([position]), device)[:, :, None]
    return Rows(slice(0, span), torch.tensor([tokens], device=device), mask)


def _together(chunks: Sequence[tuple[int, Chunk]], heads: int) -> bool:
    """Whether prompts take fewer products token by token, all at once, than one after another, head by head."""
    longest = max(len(chunk.ids) for _, chunk in chunks)
    most = max(chunk.start for _, chunk in chunks) + longest
    return longest < len(chunks) * heads and longest * len(chunks) * most < TOGETHER


def _gathered(chunks: Sequence[tuple[int, Chunk]], nowhere: int, device: torch.device) -> Rows:
    """Prompts, token by token; their slots are copied."""
    longest = max(len(chunk.ids) for _, chunk in chunks)
    tokens = [
        [*range(first, first + len(chunk.ids)), *[nowhere] * (longest - len(chunk.ids))] for first, chunk in chunks
    ]
    starts = torch.tensor([chunk.start for _, chunk in chunks])
    lengths = torch.tensor([len(chunk.ids) for _, chunk in chunks])
    position_PS = starts + torch.minimum(torch.arange(longest)[:, None], lengths - 1)
    slots = torch.tensor([chunk.slot for _, chunk in chunks], device=device)
    tokens_PS = torch.tensor(tokens, device=device).T.contiguous()
    return Rows(slots, tokens_PS, _causal_mask(position_PS, device)[:, :, None])


def _blocks(first: int, chunk: Chunk, device: torch.device) -> Iterator[Block]:
    for done in range(0, len(chunk.ids), BLOCK):
        positions = torch.arange(chunk.start + done, chunk.start + min(done + BLOCK, len(chunk.ids)))
        yield Block(chunk.slot, first + done, _causal_mask(positions, device)[:, None])


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: Pass | None = None,
    **others: Any,  # noqa: ANN401  # each model passes its own arguments
) -> tuple[Tensor, None]:
    """Attention function of a decoder layer: queries (1, h, N, d), keys and values (1, g, N, d), output (1, N, h, d).

    Args:
        packed: without it this is transformers' ``sdpa``.
        others: of the layer; ``scaling`` is used.
    """
    if packed is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **others)
        return plain
    keys, values = packed.slots.of(int(module.layer_idx), key, value)  # type: ignore[arg-type]  # nn.Module types its attributes as Tensor | Module
    written, positions = packed.slot, packed.position[0, : len(packed.slot)]
    keys[written, :, positions, : key.shape[-1]] = key[0, :, : len(written)].transpose(0, 1)
    values[written, :, positions, : value.shape[-1]] = value[0, :, : len(written)].transpose(0, 1)
    scale = float(others.get("scaling") or query.shape[-1] ** -0.5)
    exact = query.dtype == torch.float32 and query.device.type == "cpu"
    singles, block = (_singles, _block) if exact else (_singles_fused, _block_fused)
    query_Nhd = functional.pad(query[0].transpose(0, 1), (0, keys.shape[-1] - query.shape[-1]))
    output = query.new_zeros(query.shape[2] + 1, query.shape[1], values.shape[-1])
    for rows in packed.rows:
        length = rows.mask.shape[-1]
        keys_SgLd, values_SgLd = keys[rows.slots, :, :length], values[rows.slots, :, :length]
        for tokens_S, mask_S1L in zip(rows.tokens, rows.mask, strict=True):
            query_Shd = query_Nhd[tokens_S.clamp(max=len(query_Nhd) - 1)]
            output[tokens_S] = singles(query_Shd, keys_SgLd, values_SgLd, mask_S1L, scale)
    for slot, first, mask_P1L in packed.blocks:
        inside, length = slice(first, first + len(mask_P1L)), mask_P1L.shape[-1]
        output[inside] = block(query_Nhd[inside], keys[slot, :, :length], values[slot, :, :length], mask_P1L, scale)
    return output[None, :-1, :, : value.shape[-1]], None


def _singles(query_Shd: Tensor, keys_SgLd: Tensor, values_SgLd: Tensor, mask_S1L: Tensor, scale: float) -> Tensor:
    """One query for each of S slots: (S, h, d)."""
    (count, heads, size), groups = query_Shd.shape, keys_SgLd.shape[1]
    shared = heads // groups  # query heads of a key head
    query_SgGd = query_Shd.view(count, groups, shared, size)
    keys, values = keys_SgLd.flatten(0, 1).transpose(1, 2), values_SgLd.flatten(0, 1)
    mask = mask_S1L.repeat_interleave(groups, dim=0)
    outputs = [
        _exact(query_SgGd[:, :, head].reshape(count * groups, 1, size), keys, values, mask, scale).view(
            count, groups, -1
        )
        for head in range(shared)
    ]
    return torch.stack(outputs, dim=2).view(count, heads, -1)


def _block(query_Phd: Tensor, keys_gLd: Tensor, values_gLd: Tensor, mask_P1L: Tensor, scale: float) -> Tensor:
    """P queries of one slot: (P, h, d)."""
    count, heads = query_Phd.shape[:2]
    shared = heads // keys_gLd.shape[0]
    outputs = [
        _exact(
            query_Phd[:, head, None],
            keys_gLd[head // shared].T.expand(count, -1, -1),
            values_gLd[head // shared].expand(count, -1, -1),
            mask_P1L,
            scale,
        )
        for head in range(heads)
    ]
    return torch.cat(outputs, dim=1)


def _exact(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Vector times matrix: queries (·, 1, d), keys (·, d, L), values (·, L, d), mask (·, 1, L)."""
    return torch.bmm(torch.baddbmm(mask, query, keys, alpha=scale).softmax(dim=-1), values)


def _singles_fused(query_Shd: Tensor, keys_SgLd: Tensor, values_SgLd: Tensor, mask_S1L: Tensor, scale: float) -> Tensor:
    mask = mask_S1L[:, None].to(query_Shd.dtype)
    # the query heads of a key head as further queries, which read it once; with ``enable_gqa`` a CPU does so for each
    query_Sgqd = query_Shd.view(len(query_Shd), keys_SgLd.shape[1], -1, query_Shd.shape[-1])
    fused = functional.scaled_dot_product_attention
    return fused(query_Sgqd, keys_SgLd, values_SgLd, attn_mask=mask, scale=scale).flatten(1, 2)


def _block_fused(query_Phd: Tensor, keys_gLd: Tensor, values_gLd: Tensor, mask_P1L: Tensor, scale: float) -> Tensor:
    query, mask = query_Phd.transpose(0, 1)[None], mask_P1L[None].transpose(1, 2).to(query_Phd.dtype)
    fused = functional.scaled_dot_product_attention
    return fused(query, keys_gLd[None], values_gLd[None], attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(
        0, 1
    )


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
