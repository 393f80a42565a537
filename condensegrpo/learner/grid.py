"""Where the tokens of packed trees lie in the grid (rows, columns) that a model with dense attention computes.

Dense attention computes every pair of a grid row's tokens, masked or not, so that unrelated trees cost less in rows of
their own than behind each other in one long row; short ones share a row, since padding costs as well.

    trees of 5, 3 and 2 tokens   ─▶   a a a a a
                                      b b b c c

Legend: S packed tokens, B rows and L columns of the grid.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from condensegrpo.errors import LearnerError
from condensegrpo.packing import first_fit
from condensegrpo.prefix_tree import LINEAR

STRETCH = 1.25  # from one number of columns that is tried to the next


class Arrangement(NamedTuple):
    """Which trees lie in which row of the grid."""

    rows: Sequence[Sequence[int]]  # indices of trees
    columns: int
    masked: bool  # False: a row alone in each, which causal attention keeps apart by itself


class Grid(NamedTuple):
    """What the model computes, and where in it the packed tokens are."""

    token_ids: Tensor  # (B, L) int64
    position_ids: Tensor  # (B, L) int64
    visible: Tensor | None  # (B, 1, L, L) bool, whether a query sees a key; None: all before it, in a plain row
    row_S: Tensor  # (S,) int64
    column_S: Tensor  # (S,) int64


def arrange(lengths: Sequence[int], *, width: int, branching: bool) -> Arrangement:
    """The cheapest of some arrangements of trees.

    Cost of B rows and L columns in a model of hidden size ``width``, as in ``prefix_tree.cost``; half of the attention
    is saved where it is causal and not told by a mask:

        masked     B·L·(6·width + L)
        causal     B·L·(6·width + L/2)      a plain row in each row of the grid, padded on the right

    Example: plain rows of 500 and 100 tokens, width 64, cost 1000·(384 + 250) = 634 k side by side and
    600·(384 + 600) = 590 k behind each other.

    Args:
        lengths: tokens of each tree.
        branching: whether any of them is more than a plain row.
    """
    longest, total = max(lengths), sum(lengths)
    best = apart(lengths)
    least = None if branching else _cost(len(lengths), longest, width, masked=False)
    columns = longest
    while True:
        rows_at_least = -(-total // columns)
        if least is None or _cost(rows_at_least, columns, width, masked=True) < least:
            rows = first_fit(lengths, columns)
            filled = max(sum(lengths[tree] for tree in row) for row in rows)
            found = _cost(len(rows), filled, width, masked=True)
            if least is None or found < least:
                best, least = Arrangement(rows, filled, masked=True), found
        if columns >= total:
            return best
        columns = min(total, int(columns * STRETCH) + 1)


def apart(lengths: Sequence[int]) -> Arrangement:
    """Every plain row in a row of its own."""
    return Arrangement([[tree] for tree in range(len(lengths))], max(lengths), masked=False)


def laid_out(token_ids: Tensor, position_ids: Tensor, reach: Tensor, *, width: int | None) -> Grid:
    """The grid of packed trees, each (1, S).

    Args:
        width: hidden size of the model; None: the model takes plain rows only, each in a row of its own.

    Raises:
        LearnerError: such a model was given a tree.
    """
    place_S = torch.arange(position_ids.numel(), device=position_ids.device)
    start = (position_ids[0] == 0).nonzero().flatten()
    end = torch.cat([start[1:], start.new_tensor([len(place_S)])])
    tree_S = (position_ids[0] == 0).cumsum(dim=0) - 1
    lengths = (end - start).tolist()
    branching = bool((reach[0] != end[tree_S]).any())
    if branching and width is None:
        raise LearnerError(
            "computing a micro-batch of prefix trees with a model that takes plain rows only (without_trees says why). "
            "Pack its rows with width=None."
        )
    found = apart(lengths) if width is None else arrange(lengths, width=width, branching=branching)
    row_of, first_column = _origins(lengths, found.rows)
    row_S = start.new_tensor(row_of)[tree_S]
    shift_S = start.new_tensor(first_column)[tree_S] - start[tree_S]  # from a place in S to its column
    column_S = place_S + shift_S
    column_L = torch.arange(found.columns, device=place_S.device)
    padded_BL = token_ids.new_zeros(len(found.rows), found.columns).index_put((row_S, column_S), token_ids[0])
    if not found.masked:
        return Grid(padded_BL, column_L.expand_as(padded_BL), None, row_S, column_S)
    position_BL = torch.zeros_like(padded_BL).index_put((row_S, column_S), position_ids[0])
    # padding sees itself alone: attention to nothing at all is not a number
    reach_BL = (column_L + 1).expand_as(padded_BL).index_put((row_S, column_S), reach[0] + shift_S)
    visible_BLL = (column_L[None, None] <= column_L[None, :, None]) & (column_L[None, :, None] < reach_BL[:, None])
    return Grid(padded_BL, position_BL, visible_BLL[:, None], row_S, column_S)


def _origins(lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The row and the first column of every tree."""
    row_of, first_column = [0] * len(lengths), [0] * len(lengths)
    for number, row in enumerate(rows):
        column = 0
        for tree in row:
            row_of[tree], first_column[tree] = number, column
            column += lengths[tree]
    return row_of, first_column


def _cost(rows: int, columns: int, width: int, *, masked: bool) -> int:
    """Twice the cost in the docstring of ``arrange``, in whole numbers."""
    return rows * columns * (2 * LINEAR * width + (2 if masked else 1) * columns)
