"""The arithmetic that a gradient needs at least, counted by hand."""

from collections.abc import Sequence

from passes import ModelSize

from condensegrpo.algorithms.prefix_tree import tree
from condensegrpo.core.trajectory import Segment


def useful_flops(size: ModelSize, rows: Sequence[Segment]) -> float:
    """Floating-point operations of forward and backward with every shared token computed once; no recomputation.

        6·D·S + 12·layers·heads·head·Σ_s (depth_s + 1) + 6·hidden·vocabulary·T

    S different tokens, each through D decoder weights that multiply; a token at depth d looks at d + 1 keys; T trained
    tokens go through the LM head. A multiplication and its addition are two operations, and backward has two products
    for each of forward's.
    """
    shared = tree([row.token_ids for row in rows])
    attention = (2 * size.heads + 2 * size.kv_heads) * size.head * size.hidden
    weights = size.layers * (attention + 3 * size.hidden * size.ffn)
    pairs = sum(depth + 1 for depth in shared.positions)
    trained = sum(sum(row.trained) for row in rows)
    return (
        6.0 * weights * len(shared.token_ids)
        + 12.0 * size.layers * size.heads * size.head * pairs
        + 6.0 * size.hidden * size.vocabulary * trained
    )
