"""Rows to micro-batches, balanced over all ranks: a rank with more to compute sends rows to the others."""

from collections.abc import Sequence
from itertools import chain

from condensegrpo.algorithms.packing import PackedBatch, balanced_owners, block_tokens, blocks, micro_batches
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner import ranks


def pack_rows(rows: Sequence[Segment], *, max_tokens: int, share: bool, ranks_a_row: int = 1) -> list[PackedBatch]:
    """The micro-batches that this rank computes, out of the rows of all; every rank must call it, with or without rows.

    A rank's own rows share their prefixes, since it sampled whole groups; only what moves to another rank is sent.

    Args:
        max_tokens: the budget of a micro-batch.
        share: ``TrainedLogprobs.computes_trees``.
        ranks_a_row: ``TrainedLogprobs.ranks_a_row``. So many consecutive ranks get the same micro-batches.

    Raises:
        LearnerError: a row alone is over the budget.
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
    return micro_batches([*kept, *received], max_tokens=max_tokens)
