"""Attention along prefix trees by flash-attention: each branch is a sequence whose keys begin before its queries.

    rows        1 2 3 4     1 2 3 5     1 6

    index       0 1 2 3 4 5             branch    queries      keys
    token       1 2 3 4 5 6             0         0 1 2 3      0 1 2 3
    depth       0 1 2 3 3 1             1         4            0 1 2 4
                                        2         5            0 5

Branches lie one after another already: queries stay where they are. Keys and values are gathered, the whole path of
each branch. Where there are more keys than queries, flash-attention lets the last query see the last key (version 2.1
and later), which is the rule of ``tree_attention.py``: a query of depth p sees the keys 0 … p.

Exactly the pairs that are needed are computed, without padding or a mask. What it costs is the gathered keys, Σ lengths
of paths: as many as tokens where nothing is shared, and a whole prefix for every branch where much is.

Legend: S packed tokens, G gathered keys, b branches, h query heads, g key heads, d their size.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK, lazy_import_flash_attention
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
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float = 0.0
    ) -> Tensor:
        """The output (1, S, h, d) of queries (1, h, S, d), keys and values (1, g, S, d). There is no dropout."""
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


def branches(depths: Sequence[int], varlen: Varlen) -> HostPattern:
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
    """flash-attention 2, of the package flash-attn or, without that, of the package kernels, which downloads it once.

    Raises:
        Exception: whatever the packages raise where it cannot be loaded.
    """
    name = FLASH_2 if is_flash_attn_2_available() else FLASH_ATTN_KERNEL_FALLBACK[FLASH_2]
    (_, varlen, *_), _ = lazy_import_flash_attention(name)
    return cast(Varlen, varlen)
