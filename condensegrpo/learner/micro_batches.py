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
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from condensegrpo.algorithms.packing import PackedBatch, balanced_owners, block_tokens, blocks, micro_batches
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
    here = blocks(rows, max_tokens=max_tokens, share=share, ranks=ranks.world_size() // ranks_a_row)
    sizes = ranks.gather([block_tokens(block) for block in here])
    groups = [sizes[first : first + ranks_a_row] for first in range(0, len(sizes), ranks_a_row)]
    before = sum(len(of_rank) for of_rank in sizes[group * ranks_a_row : rank])
    owners = balanced_owners([[*chain.from_iterable(of_ranks)] for of_ranks in groups])[group]
    owned = list(zip(owners[before : before + len(here)], here, strict=True))
    kept = [block for owner, block in owned if owner == group and ranks_a_row == 1]
    sent = ranks.gather([(owner, block) for owner, block in owned if owner != group or ranks_a_row > 1])
    received = [block for of_rank in sent for owner, block in of_rank if owner == group]
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
    which: Tensor | None  # (T',) int64, those of this rank; None: all T
    pictures: ShownPictures | None  # that its tokens show; None: it is text

    @property
    def predicted_here(self) -> PackedBatch:
        """The columns of the trained tokens that this rank predicts."""
        return self.columns if self.which is None else self.columns.trained(self.which)


class Layout(NamedTuple):
    """A micro-batch as the decoder computes it, in main memory; the fields are those of ``DeviceBatch``."""

    token_ids: Tensor
    position_ids: Tensor
    source: Tensor
    pattern: HostPattern | None = None
    which: Tensor | None = None


def upload_batch(
    batch: PackedBatch, layout: Layout, device: torch.device, pictures: ShownPictures | None = None
) -> DeviceBatch:
    """A micro-batch on a device, with the pictures that it shows."""
    token_ids, position_ids, source, pattern, which = layout
    given = [token_ids, position_ids, source, source if which is None else which]
    columns, indices = batch.columns, () if pattern is None else pattern.indices
    shown = () if pictures is None else pictures.tensors
    uploaded = copy_to_device([*given, *shown, *columns.values(), *indices], device)
    first = len(given) + len(shown)
    last = first + len(columns)
    of_trained: dict[str, Any] = dict(zip(columns, uploaded[first:last], strict=True))
    return DeviceBatch(
        token_ids=uploaded[0],
        position_ids=uploaded[1],
        source=uploaded[2],
        which=None if which is None else uploaded[3],
        pattern=None if pattern is None else pattern.of_uploaded(*uploaded[last:]),
        pictures=None if pictures is None else pictures.of_uploaded(*uploaded[len(given) : first]),
        columns=PackedBatch(**of_trained),
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
            "computing a micro-batch of prefix trees with a model that takes plain rows only (without_trees says why). "
            "Pack its rows with share=False."
        )
    row_S = (column_S == 0).cumsum(dim=0) - 1
    rows, columns = int(row_S[-1]) + 1, int(column_S.max()) + 1

    def spread(packed_S: Tensor) -> Tensor:
        return packed_S.new_zeros(rows, columns).index_put((row_S, column_S), packed_S)

    column_L = torch.arange(columns, device=column_S.device).expand(rows, columns)
    positions = torch.stack([column_L, *map(spread, axes)]) if axes else column_L
    return Layout(spread(token_ids[0]), positions, row_S[source] * columns + column_S[source])
