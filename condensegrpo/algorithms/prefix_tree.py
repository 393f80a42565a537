"""Prefix trees: rows that begin alike, with what they begin with laid out once. Pure; ids and counts, no tensors.

Tokens lie depth-first. Their positions define the whole tree: a token whose position is one more than the last one's
continues it; any other one of position p continues the first p tokens of the row before it.

    rows        1 2 3 4     1 2 3 5     1 6

    index       0 1 2 3 4 5
    token       1 2 3 4 5 6         5 at index 4 continues 1 2 3, and 6 at index 5 continues 1
    position    0 1 2 3 3 1         depth in the row

Linear layers compute the S tokens, of which a tree has fewer than its rows. Attention (``learner/tree_attention.py``)
computes a pair for each of them and each token of its row up to itself: fewer again. What a kernel pays for gathering
keys along paths is in ``learner/attention_kernels.py``.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from condensegrpo.core.shared_sequence import common_prefix

TokenIds = Sequence[int]


class Tree(NamedTuple):
    """Rows laid out as a tree of S tokens, or as several where they begin differently."""

    token_ids: tuple[int, ...]  # (S,) depth-first
    positions: tuple[int, ...]  # (S,) depth in the row, from 0
    indices: tuple[tuple[int, ...], ...]  # by row, in the order given: where each of its tokens lies


def tree(rows: Sequence[TokenIds]) -> Tree:
    """The rows as a tree. Equal rows share all their tokens, and a row that begins another one lies within it."""
    token_ids: list[int] = []
    positions: list[int] = []
    path: list[int] = []  # the indices of the row before
    indices: dict[int, tuple[int, ...]] = {}
    order, shared = sorted_rows(rows)
    for number, kept in zip(order, shared, strict=True):
        row, start = rows[number], len(token_ids)
        path[kept:] = range(start, start + len(row) - kept)
        token_ids.extend(row[kept:])
        positions.extend(range(kept, len(row)))
        indices[number] = tuple(path)
    return Tree(
        token_ids=tuple(token_ids),
        positions=tuple(positions),
        indices=tuple(indices[number] for number in range(len(rows))),
    )


def sorted_rows(rows: Sequence[TokenIds]) -> tuple[list[int], list[int]]:
    """The rows' indices in the order of their ids, which is depth-first, and how many tokens each shares with the last.

    Example: rows [1 2 3], [4], [1 2] give the order 2, 0, 1 and 0, 2, 0 shared tokens.
    """
    order = sorted(range(len(rows)), key=lambda index: tuple(rows[index]))
    shared = [common_prefix(rows[last], rows[index]) for last, index in pairwise(order)]
    return order, [0, *shared][: len(order)]


def tree_groups(rows: Sequence[TokenIds], *, max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """The trees to make of the rows: for each the indices of its rows.

    Rows are sorted. A tree over ``max_tokens`` is cut in two where neighbours share the fewest tokens, which the second
    half then repeats; of several such cuts it takes the one that makes the halves most alike. Trees that share nothing
    are cut as well.

    Example: [1 2 3], [1 2 4], [1 5] and [6] give a tree of five tokens and one of a single token. If a tree may have
    four, then [1 2 3] and [1 2 4] are one, and [1 5] another.

    Args:
        max_tokens: the largest tree. A row that is larger is left alone.
    """
    order, shared = sorted_rows(rows)
    new = [len(rows[index]) - kept for index, kept in zip(order, shared, strict=True)]
    before = list(accumulate(new, initial=0))  # (rows + 1,) tokens before each row in order, if all were one tree
    groups = []
    waiting = [(0, len(order))] if order else []
    while waiting:
        start, end = waiting.pop()
        # by what is repeated, then by how much the halves differ
        cuts = {
            cut: (shared[cut], abs(before[end] + before[start] - 2 * before[cut] + shared[cut] - shared[start]))
            for cut in range(start + 1, end)
        }
        fits = before[end] - before[start] + shared[start] <= max_tokens
        if not cuts or (fits and min(cuts.values())[0] > 0):
            groups.append(tuple(order[start:end]))
            continue
        best = min(cuts, key=cuts.__getitem__)
        waiting += [(best, end), (start, best)]
    return tuple(groups)


def distinct_tokens(rows: Sequence[TokenIds]) -> int:
    """The tokens of the rows' tree: each shared prefix counted once."""
    order, shared = sorted_rows(rows)
    return sum(len(rows[index]) - kept for index, kept in zip(order, shared, strict=True))
