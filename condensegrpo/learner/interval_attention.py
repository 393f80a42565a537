"""Attention along prefix trees by ``flex_attention``: one integer per token says which queries see it. For GPUs.

Packed tokens lie depth-first, so that what continues a token is the interval of tokens after it. With ``end[k]`` =
the index after the last of those, the rule of ``tree_attention.py`` reads

    **q sees k  ⟺  k ≤ q < end[k]**

    rows        1 2 3 4     1 2 3 5     1 6

    index       0 1 2 3 4 5
    token       1 2 3 4 5 6
    depth       0 1 2 3 3 1
    end         6 5 5 4 5 6         6 at index 5 sees the tokens 1 (0 ≤ 5 < 6) and 6; 5 at index 4 sees 1 2 3 5

The kernel works on blocks of 128 × 128 pairs. Which of them it skips, computes whole or computes in part follows from
the least and the largest ``end`` of 128 keys. ``create_block_mask`` would find the same by looking at all S² pairs;
here nothing larger than (S/128)² is made. Forward keeps what plain attention keeps; nothing is gathered.

A length is a multiple of 128, at least 256: the kernel is compiled with lengths left open, and a single block would be
compiled for itself. Tokens of padding come after the others, each a tree of its own.

Legend: S tokens with padding, n = S/128 blocks, h query heads, g key heads, d their size.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from condensegrpo.learner.tree_attention import HostPattern

BLOCK = 128  # queries and keys of a block: what torch's kernels are tuned for
COMPILED = 32  # most variants of the kernel: of types, of head sizes, with and without gradients; never of lengths
# ``flex_attention``, compiled: queries (1, h, S, d), keys and values (1, g, S, d); the output is (1, h, S, d)
Flex = Callable[..., Tensor]


class Intervals(NamedTuple):
    """The attention pattern of S tokens, computed by ``flex_attention``."""

    mask: BlockMask
    flex: Flex

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float = 0.0
    ) -> Tensor:
        """The output (1, S, h, d) of queries (1, h, S, d), keys and values (1, g, S, d). There is no dropout."""
        output = self.flex(query, key, value, block_mask=self.mask, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2)


def intervals(depths: Sequence[int], flex: Flex) -> HostPattern:
    """The intervals of packed trees, of which ``depths`` are those of the tokens in their rows."""
    tokens = BLOCK * max(2, -(-len(depths) // BLOCK))
    end = torch.tensor(ends([*depths, *[0] * (tokens - len(depths))]), dtype=torch.int32)
    return HostPattern(tokens=tokens, indices=(end,), of_uploaded=lambda end: Intervals(block_mask(end), flex))


def ends(depths: Sequence[int]) -> list[int]:
    """The index after the last token that continues each token. Example: 0 1 2 3 3 1 give 6 5 5 4 5 6."""
    end = [len(depths)] * len(depths)
    path: list[int] = []
    for index, depth in enumerate(depths):
        for key in path[depth:]:
            end[key] = index
        path[depth:] = [index]
    return end


def block_mask(end: Tensor) -> BlockMask:
    """The blocks of pairs that are computed, (n, n) of them: equal to what ``create_block_mask`` makes of all pairs.

    Args:
        end: (S,) int32, S a multiple of 128.
    """
    least, most = end.view(-1, BLOCK).aminmax(dim=1)
    first = torch.arange(0, len(end), BLOCK, device=end.device)[:, None]  # query of each block
    before = first > first.T
    whole = before & (least >= first + BLOCK)
    part = (before & (most > first) & ~whole) | (first == first.T)  # a token always sees itself
    kv_num_blocks, kv_indices = _counted_and_sorted(part)
    full_kv_num_blocks, full_kv_indices = _counted_and_sorted(whole)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    return BlockMask.from_kv_blocks(
        kv_num_blocks,
        kv_indices,
        full_kv_num_blocks,
        full_kv_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(end), len(end)),
    )


def _counted_and_sorted(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the (n, n) blocks are computed for each block of queries, and the indices of all, those first."""
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(dim=1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


@cache
def compiled_flex(backend: str = "inductor") -> Flex:
    """``flex_attention`` compiled once for all lengths.

    With ``fullgraph`` one variant too many is an error. Without, torch would go on uncompiled and make all S² pairs.
    """
    compiled = torch.compile(  # type: ignore[call-overload]  # torch's stubs lack recompile_limit
        flex_attention, dynamic=True, fullgraph=True, recompile_limit=COMPILED, backend=backend
    )
    return cast(Flex, compiled)
