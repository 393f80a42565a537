"""Attention along prefix trees on a GPU: branches for flash-attention, intervals for ``flex_attention``.

Both compute exactly the pairs that the rule of ``tree_attention.py`` allows: a query of depth p sees the keys 0 … p of
its row. Packed tokens lie depth-first:

    rows        1 2 3 4     1 2 3 5     1 6

    index       0 1 2 3 4 5             branch    queries      keys
    token       1 2 3 4 5 6             0         0 1 2 3      0 1 2 3
    depth       0 1 2 3 3 1             1         4            0 1 2 4
    end         6 5 5 4 5 6             2         5            0 5

**Branches.** Each branch is a sequence whose keys begin before its queries. Branches lie one after another: queries
stay where they are; keys and values are gathered, the whole path of each branch. Where there are more keys than
queries, flash-attention lets the last query see the last key (version 2.1 and later). The cost is the gathered keys,
Σ lengths of paths: as many as tokens where nothing is shared, and a whole prefix for every branch where much is.

**Intervals.** The tokens that continue a token are the interval after it. With ``end[k]`` = the index after the last of
them, q sees k ⟺ k ≤ q < end[k]: 6 at index 5 sees the tokens 1 (0 ≤ 5 < 6) and 6; 5 at index 4 sees 1 2 3 5. The kernel
works on blocks of 128 × 128 pairs. The least and the largest ``end`` of 128 keys decide which blocks it skips, computes
whole or computes in part: ``create_block_mask`` would find the same by looking at all S² pairs; here nothing larger
than (S/128)² is made. Forward keeps what plain attention keeps. A length is a multiple of 128, at least 256: the kernel
is compiled with lengths left open, and a single block would be compiled for itself. Tokens of padding come after the
others, each a tree of its own.

Legend: S packed tokens (with padding for intervals), n = S/128 blocks, G gathered keys, b branches, h query heads,
g key heads, d their size.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import modeling_flash_attention_utils
from transformers.utils import is_flash_attn_2_available

from condensegrpo.learner.tree_attention import HostPattern, branch_starts

FLASH_2 = "flash_attention_2"  # not 3, whose build for the kernels package has no backward pass
# ``flash_attn_varlen_func`` of flash-attention 2: queries (S, h, d), keys and values (G, g, d); the output is (S, h, d)
Varlen = Callable[..., Tensor]


class Branches(NamedTuple):
    """The attention pattern of S packed tokens, computed by flash-attention."""

    keys: Tensor  # (G,) int64, indices of the branches' paths, one after another
    query_starts: Tensor  # (b + 1,) int32, of the branches among the queries, and S
    key_starts: Tensor  # (b + 1,) int32, of the branches among the gathered keys, and G
    longest: tuple[int, int]  # most queries and keys of a branch
    varlen: Varlen

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's; its packages register it for no compiler
    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> Tensor:
        """The output (1, S, h, d) of queries (1, h, S, d), keys and values (1, g, S, d)."""
        size, wide = value.shape[-1], query.shape[-1]
        queries, keys, values = (
            each[0].transpose(0, 1) for each in (query, key, functional.pad(value, (0, wide - size)))
        )
        output = self.varlen(
            queries,
            keys.index_select(0, self.keys),
            values.index_select(0, self.keys),
            cu_seqlens_q=self.query_starts,
            cu_seqlens_k=self.key_starts,
            max_seqlen_q=self.longest[0],
            max_seqlen_k=self.longest[1],
            softmax_scale=scaling,
            causal=True,
        )
        return output[None, ..., :size]


def gathered_keys(depths: Sequence[int]) -> int:
    """Keys that all branches together gather, G: Σ lengths of their paths. Example: depths 0 1 2 3 3 1 give 10."""
    return sum(depths[end - 1] + 1 for _, end in pairwise([*branch_starts(depths), len(depths)]))


def branch_pattern(depths: Sequence[int], varlen: Varlen) -> HostPattern:
    """The branches of packed trees, of which ``depths`` (S,) are those of the tokens in their rows."""
    bounds = [*branch_starts(depths), len(depths)]
    keys: list[int] = []
    path: list[int] = []
    lengths = []
    for start, end in pairwise(bounds):
        path[depths[start] :] = range(start, end)
        keys += path
        lengths.append(len(path))
    starts = [torch.tensor(each, dtype=torch.int32) for each in (bounds, list(accumulate(lengths, initial=0)))]
    longest = max(end - start for start, end in pairwise(bounds)), max(lengths)
    return HostPattern(
        tokens=len(depths),
        indices=(torch.tensor(keys), *starts),
        of_uploaded=partial(Branches, longest=longest, varlen=varlen),
    )


@cache
def flash_varlen() -> Varlen:
    """flash-attention 2, of the package flash-attn, or else of the package kernels, which downloads it once."""
    library = modeling_flash_attention_utils
    name = FLASH_2 if is_flash_attn_2_available() else library.FLASH_ATTN_KERNEL_FALLBACK[FLASH_2]  # not in 5.0
    (_, varlen, *_), _ = library.lazy_import_flash_attention(name)
    return cast(Varlen, varlen)


BLOCK = 128  # queries and keys of a block: what torch's kernels are tuned for
COMPILED = 32  # most variants of the kernel: of types, of head sizes, with and without gradients; never of lengths
# ``flex_attention``, compiled: queries (1, h, S, d), keys and values (1, g, S, d); the output is (1, h, S, d)
Flex = Callable[..., Tensor]


class Intervals(NamedTuple):
    """The attention pattern of S tokens, computed by ``flex_attention``."""

    mask: BlockMask
    flex: Flex

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> Tensor:
        """The output (1, S, h, d) of queries (1, h, S, d), keys and values (1, g, S, d)."""
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
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, COMPILED)  # torch 2.11 has no limit of one call
    return cast(Flex, torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend))
