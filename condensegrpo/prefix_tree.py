"""Prefix trees: rows that begin alike, with what they begin with laid out once. Pure; ids and counts, no tensors.

Tokens lie depth-first, so that what continues a token lies behind it without a gap, up to its ``reach``. Who sees whom
is then a comparison of places: a query at q sees a key at k if and only if  k <= q < reach[k],  which holds for q and
for what lies before it in its own row. A row alone is the tree in which every token reaches to the end.

    rows        1 2 3 4     1 2 3 5     1 6

    place       0 1 2 3 4 5
    token       1 2 3 4 5 6         2 at place 1 is continued by places 2, 3 and 4
    position    0 1 2 3 3 1         depth in the row
    reach       6 5 5 4 5 6         6 at place 5 sees place 0 and itself
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

TokenIds = Sequence[int]

LINEAR = 6  # what a token's linear layers cost, in keys that its attention looks at, per unit of hidden size


class Tree(NamedTuple):
    """Rows laid out as a tree of S tokens, or as several where they begin differently."""

    token_ids: tuple[int, ...]  # (S,) depth-first
    positions: tuple[int, ...]  # (S,) depth in the row, from 0
    reach: tuple[int, ...]  # (S,) the place after the last token that continues it
    places: tuple[tuple[int, ...], ...]  # by row, in the order given: where each of its tokens lies


def tree(rows: Sequence[TokenIds]) -> Tree:
    """The rows as a tree. Equal rows share all their tokens, and a row that begins another one lies within it."""
    token_ids: list[int] = []
    positions: list[int] = []
    reach: list[int] = []
    path: list[int] = []  # the places of the row before
    places: dict[int, tuple[int, ...]] = {}
    order, shared = in_order(rows)
    for index, kept in zip(order, shared, strict=True):
        row, here = rows[index], len(token_ids)
        for place in path[kept:]:
            reach[place] = here
        new = len(row) - kept
        path[kept:] = range(here, here + new)
        token_ids.extend(row[kept:])
        positions.extend(range(kept, len(row)))
        reach.extend([0] * new)
        places[index] = tuple(path)
    for place in path:
        reach[place] = len(token_ids)
    return Tree(
        token_ids=tuple(token_ids),
        positions=tuple(positions),
        reach=tuple(reach),
        places=tuple(places[index] for index in range(len(rows))),
    )


def in_order(rows: Sequence[TokenIds]) -> tuple[list[int], list[int]]:
    """The rows' indices in the order of their ids, which is depth-first, and how many tokens each shares with the last.

    Example: rows [1 2 3], [4], [1 2] give the order 2, 0, 1 and 0, 2, 0 shared tokens.
    """
    order = sorted(range(len(rows)), key=lambda index: tuple(rows[index]))
    shared = [_alike(rows[last], rows[index]) for last, index in pairwise(order)]
    return order, [0, *shared][: len(order)]


def grouped(rows: Sequence[TokenIds], *, width: int, max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """The cheapest trees to make of the rows: the indices of each one's rows.

    A tree computes what its rows share once, and lets every token look at every other, masked or not; a prefix is
    therefore repeated in a second tree where the branches are long. What a tree costs is ``cost``. Rows are put in
    order and cut into runs: with D(0) = 0 and U(i, j) the different tokens of rows i … j−1,

        D(j) = min over i of  D(i) + cost(U(i, j))

    Plain rows alone need no mask, and their attention costs half: if that is less than D, nothing is shared.

    Example: hidden size 64, 8 rows of the same 500 tokens and 100 of their own make one tree of 1300 tokens,
    1300·(384 + 1300) = 2.2 M, and no eight rows, 8·600·(384 + 300) = 3.3 M. With 100 and 500 tokens it would be
    4100·(384 + 4100) = 18.4 M against 3.3 M: eight rows.

    Args:
        width: hidden size of the model.
        max_tokens: the largest tree. A row that is larger is left alone.
    """
    order, shared = in_order(rows)
    room = min(max_tokens, _enough(rows, shared, width))
    least, cuts = [0], [0]
    for end in range(1, len(order) + 1):
        start = end - 1
        tokens = len(rows[order[start]])
        found = (least[start] + cost(tokens, width), start)
        while shared[start] > 0:  # trees that share nothing are never cheaper as one
            start -= 1
            tokens += len(rows[order[start]]) - shared[start + 1]
            if tokens > room:
                break
            found = min(found, (least[start] + cost(tokens, width), start))
        least.append(found[0])
        cuts.append(found[1])
    if sum(causal_cost(len(row), width) for row in rows) <= least[-1]:
        return tuple((index,) for index in range(len(rows)))
    groups = []
    end = len(order)
    while end > 0:
        groups.append(tuple(order[cuts[end] : end]))
        end = cuts[end]
    return tuple(reversed(groups))


def different(rows: Sequence[TokenIds]) -> int:
    """The tokens of the rows' tree: each shared prefix counted once."""
    order, shared = in_order(rows)
    return sum(len(rows[index]) - kept for index, kept in zip(order, shared, strict=True))


def cost(tokens: int, width: int) -> int:
    """What a tree of so many tokens costs in a model of hidden size ``width``: tokens·(6·width + tokens).

    Every token goes through linear layers of about 14·width² multiplications and looks at ``tokens`` keys, for 2·width
    multiplications each; divided by the latter's 2·width, with 6 for 7 as it was measured.
    """
    return tokens * (LINEAR * width + tokens)


def causal_cost(tokens: int, width: int) -> float:
    """What a plain row costs where nothing else needs a mask: each token looks at the half of the row, in the mean."""
    return tokens * (LINEAR * width + tokens / 2)


def _enough(rows: Sequence[TokenIds], shared: Sequence[int], width: int) -> float:
    """A size that no tree of least cost is above, which spares looking at larger ones.

    With rows of at most m tokens that share at most p, a tree of U tokens can be cut near its half into one of at most
    U/2 + m and the rest, with at most p more tokens altogether. That is cheaper if

        6·width·p + (U/2 + m)² + (U/2)² < U²,     which holds for  U > m + √(3·m² + 12·width·p)
    """
    longest, most = max(map(len, rows), default=0), max(shared, default=0)
    return longest + math.sqrt(3 * longest**2 + 2 * LINEAR * width * most)


def _alike(first: TokenIds, second: TokenIds) -> int:
    """How many tokens two rows begin with alike."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
