"""Micro-batches: packed from the rows of all ranks, laid out in main memory, and uploaded by one copy.

Rows are balanced over all ranks: a rank with more to compute sends rows to the others. Models whose attention cannot
separate packed rows get them padded:

    rows of 3 and 2 tokens, packed   a a a b b   ─▶   a a a
                                                      b b 0

Causal attention needs no mask there: padding comes after the row, and no token attends to it.

Legend: S packed tokens, R rows of L columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from condensegrpo.algorithms.packing import Block, PackedBatch, balanced_owners, block_tokens, blocks, micro_batches
from condensegrpo.core.errors import LearnerError
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner import ranks
from condensegrpo.learner.devices import copy_to_device
from condensegrpo.learner.tree_attention import AttentionPattern, HostPattern
from condensegrpo.learner.vision_tower import ShownPictures


def pack_rows(
    rows: Sequence[Segment], *, max_tokens: int, share: bool, padded: bool = False, ranks_a_row: int = 1
) -> list[PackedBatch]:
    """The micro-batches that this rank computes, out of the rows of all; every rank must call it, with or without rows.

    A rank's rows share their prefixes, since it sampled whole groups; blocks that move to another rank are sent to all.

    Args:
        max_tokens: the budget of a micro-batch.
        share: ``TrainedLogprobs.computes_trees``.
        padded: ``TrainedLogprobs.pads_rows``.
        ranks_a_row: ``TrainedLogprobs.ranks_a_row``. So many consecutive ranks get the same micro-batches.
    """
    rank, group = ranks.rank(), ranks.rank() // ranks_a_row
    here: list[Block] = []

    def sizes_here() -> list[int]:
        here.extend(blocks(rows, max_tokens=max_tokens, share=share, ranks=ranks.world_size() // ranks_a_row))
        return [block_tokens(block) for block in here]

    sizes = ranks.on_every_rank(sizes_here)  # by rank, of each of its blocks
    first_ranks = range(0, len(sizes), ranks_a_row)
    sizes_by_group = [[*chain.from_iterable(sizes[first : first + ranks_a_row])] for first in first_ranks]
    earlier = sum(map(len, sizes[group * ranks_a_row : rank]))  # blocks of the ranks of this group before this one
    owners_here = balanced_owners(sizes_by_group)[group][earlier : earlier + len(here)]

    kept, sent = list[Block](), list[tuple[int, Block]]()
    for owner, block in zip(owners_here, here, strict=True):
        if owner == group and ranks_a_row == 1:
            kept.append(block)
        else:
            sent.append((owner, block))
    received = [block for of_rank in ranks.gather(sent) for owner, block in of_rank if owner == group]
    return micro_batches([*kept, *received], max_tokens=max_tokens, padded=padded)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceBatch:
    """A micro-batch as the decoder computes it, and the columns of its trained tokens.

    Where ranks compute rows together, the decoder's input is this rank's part, and ``columns`` are those of all ranks.
    """

    token_ids: Tensor  # (R, L) int64, with padding
    position_ids: Tensor  # (R, L) int64, or (4, R, L) where pictures are shown to a model with three axes
    source: Tensor  # (T',) int64, the index in R·L whose logits predict each trained token of this rank
    pattern: AttentionPattern | None  # of prefix trees; None: plain rows
    columns: PackedBatch  # of all T trained tokens
    here_T: Tensor | None  # (T',) int64, the indices in T of those that this rank predicts; None: all T
    pictures: ShownPictures | None  # that its tokens show; None: it is text

    @property
    def predicted_here(self) -> PackedBatch:
        """The columns of the trained tokens that this rank predicts."""
        return self.columns if self.here_T is None else self.columns.select(self.here_T)


class Layout(NamedTuple):
    """A micro-batch as the decoder computes it, in main memory; the fields are those of ``DeviceBatch``."""

    token_ids: Tensor
    position_ids: Tensor
    source: Tensor
    pattern: HostPattern | None = None
    here_T: Tensor | None = None


def upload_batch(
    batch: PackedBatch, layout: Layout, device: torch.device, pictures: ShownPictures | None = None
) -> DeviceBatch:
    """A micro-batch on a device, with the pictures that it shows."""
    pattern, here_T, columns = layout.pattern, layout.here_T, batch.columns
    parts: list[Sequence[Tensor]] = [
        (layout.token_ids, layout.position_ids, layout.source),
        () if here_T is None else (here_T,),
        tuple(columns.values()),
        () if pattern is None else pattern.indices,
        () if pictures is None else pictures.tensors,
    ]
    uploaded = iter(copy_to_device([*chain.from_iterable(parts)], device))
    needed, here, values, indices, shown = (list(islice(uploaded, len(part))) for part in parts)
    token_ids, position_ids, source = needed
    on_device: dict[str, Any] = dict(zip(columns, values, strict=True))
    return DeviceBatch(
        token_ids=token_ids,
        position_ids=position_ids,
        source=source,
        pattern=None if pattern is None else pattern.of_uploaded(*indices),
        columns=PackedBatch(**on_device),
        here_T=None if here_T is None else here[0],
        pictures=None if pictures is None else pictures.of_uploaded(*shown),
    )


def pad_rows(token_ids: Tensor, position_ids: Tensor, source: Tensor) -> Layout:
    """Packed rows (1, S) in a row of their own. Positions are (1, S), or (4, 1, S) with the depth in the row first.

    Args:
        source: (T,) the index in S whose logits predict each trained token.
    """
    column_S, *axes = position_ids.flatten(0, -2)
    goes_on_S = column_S[1:] == column_S[:-1] + 1
    if bool(((column_S[1:] != 0) & ~goes_on_S).any()):
        raise LearnerError(
            "computing a micro-batch of prefix trees with a model that takes plain rows only (see why_plain_rows). "
            "Pack its rows with share=False."
        )
    row_S = (column_S == 0).cumsum(dim=0) - 1
    rows, columns = int(row_S[-1]) + 1, int(column_S.max()) + 1

    def spread(packed_S: Tensor) -> Tensor:
        return packed_S.new_zeros(rows, columns).index_put((row_S, column_S), packed_S)

    column_L = torch.arange(columns, device=column_S.device).expand(rows, columns)
    positions = torch.stack([column_L, *map(spread, axes)]) if axes else column_L
    return Layout(spread(token_ids[0]), positions, row_S[source] * columns + column_S[source])
