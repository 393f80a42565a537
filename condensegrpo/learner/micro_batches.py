"""Rows to micro-batches, balanced over all ranks: a rank with more to compute sends rows to the others."""

from collections.abc import Sequence

from condensegrpo.algorithms.packing import PackedBatch, blocks, micro_batches, share_out, tokens
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner import ranks


def pack_rows(rows: Sequence[Segment], *, max_tokens: int, share: bool) -> list[PackedBatch]:
    """The micro-batches that this rank computes, out of the rows of all; every rank must call it, with or without rows.

    A rank's own rows share their prefixes, since it sampled whole groups; only what moves to another rank is sent.

    Args:
        max_tokens: the budget of a micro-batch.
        share: ``TrainedLogprobs.computes_trees``.

    Raises:
        LearnerError: a row alone is over the budget.
    """
    own = blocks(rows, max_tokens=max_tokens, share=share, ranks=ranks.world_size())
    owners = share_out(ranks.gather([tokens(block) for block in own]))
    rank = ranks.rank()
    owned = list(zip(owners[rank], own, strict=True))
    kept = [block for owner, block in owned if owner == rank]
    sent = ranks.gather([(owner, block) for owner, block in owned if owner != rank])
    received = [block for of_rank in sent for owner, block in of_rank if owner == rank]
    return micro_batches([*kept, *received], max_tokens=max_tokens)
