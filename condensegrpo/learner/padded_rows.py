"""Packed rows as a padded batch, for models whose attention cannot separate packed rows.

    rows of 3 and 2 tokens, packed   a a a b b   ─▶   a a a
                                                      b b 0

Causal attention needs no mask there: padding comes after the row, and no token attends to it.

Legend: S packed tokens, R rows of L columns.
"""

import torch
from torch import Tensor

from condensegrpo.core.errors import LearnerError
from condensegrpo.learner.device_batch import Layout


def pad_rows(token_ids: Tensor, position_ids: Tensor, source: Tensor) -> Layout:
    """Packed rows (1, S) in a row of their own. Positions are (1, S), or (4, 1, S) with the depth in the row first.

    Args:
        source: (T,) the index in S whose logits predict each trained token.

    Raises:
        LearnerError: they are prefix trees.
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
