"""How much attention along tree paths gathers for given branches, without laying them out: arithmetic on their lengths.

The rule is ``learner/tree_attention.py``'s: branches are cut into pieces, pieces of like size form a bucket, and each
bucket is padded to its largest piece.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from condensegrpo.learner.tree_attention import KEY_STEP, PIECE, QUERY_STEP
from condensegrpo.planning.formulas import Gathered


class Branch(NamedTuple):
    """Tokens that continue each other."""

    above: int  # tokens of its path before it
    length: int


def gathered(branches: Iterable[Branch]) -> Gathered:
    """What the buckets of all pieces hold, padding included.

    Example: a row of 200 tokens is two pieces of 100 queries with 100 and 200 keys, each in a bucket of its own: 200
    queries, 300 keys, 100·100 + 100·200 pairs.
    """
    alike: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for branch in branches:
        parts = -(-branch.length // PIECE)
        cuts = [branch.length * part // parts for part in range(parts + 1)]
        for first, last in pairwise(cuts):
            queries, keys = last - first, branch.above + last
            alike[(queries - 1) // QUERY_STEP, (keys - 1) // KEY_STEP].append((queries, keys))
    sizes = [(len(group), max(size[0] for size in group), max(size[1] for size in group)) for group in alike.values()]
    return Gathered(
        queries=sum(n * queries for n, queries, _ in sizes),
        keys=sum(n * keys for n, _, keys in sizes),
        pairs=sum(n * queries * keys for n, queries, keys in sizes),
    )
