"""The arithmetic that a gradient or a rollout needs at least, counted by hand."""

from collections.abc import Sequence
from itertools import pairwise

from passes import ModelSize

from condensegrpo.algorithms.prefix_tree import tree
from condensegrpo.core.trajectory import Segment

Wave = Sequence[tuple[Sequence[int], int]]  # a prompt and the length of its reply, for every trajectory


def useful_flops(size: ModelSize, rows: Sequence[Segment]) -> float:
    """Floating-point operations of forward and backward with every shared token computed once; no recomputation.

        6·D·S + 12·layers·heads·head·Σ_s (depth_s + 1) + 6·hidden·vocabulary·T

    S different tokens, each through D decoder weights that multiply; a token at depth d looks at d + 1 keys; T trained
    tokens go through the LM head. A multiplication and its addition are two operations, and backward has two products
    for each of forward's.
    """
    shared = tree([row.token_ids for row in rows])
    pairs = sum(depth + 1 for depth in shared.positions)
    trained = sum(row.trained for row in rows)
    return (
        6.0 * decoder_weights(size) * len(shared.token_ids)
        + 12.0 * size.layers * size.heads * size.head * pairs
        + 6.0 * size.hidden * size.vocabulary * trained
    )


def sampling_flops(size: ModelSize, waves: Sequence[Wave]) -> float:
    """Floating-point operations of sampling where keys and values of earlier turns are kept.

        2·D·S + 4·layers·heads·head·Σ_s (depth_s + 1) + 2·hidden·vocabulary·T

    Every prompt continues the prompt and reply before it, so that the S tokens of a trajectory are its last prompt and
    reply, each computed once; T tokens are sampled.
    """
    if any(
        tuple(later[: len(prompt)]) != tuple(prompt)
        for wave, following in pairwise(waves)
        for (prompt, _), (later, _) in zip(wave, following, strict=True)
    ):
        raise ValueError("counting the arithmetic of a rollout: a prompt does not continue the one before it")
    lengths = [len(prompt) + reply for prompt, reply in waves[-1]]
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    sampled = sum(reply for wave in waves for _, reply in wave)
    return (
        2.0 * decoder_weights(size) * sum(lengths)
        + 4.0 * size.layers * size.heads * size.head * pairs
        + 2.0 * size.hidden * size.vocabulary * sampled
    )


def decoder_weights(size: ModelSize) -> int:
    """Weights of the layers that multiply: q, k, v, o, gate, up, down."""
    attention = (2 * size.heads + 2 * size.kv_heads) * size.head * size.hidden
    return size.layers * (attention + 3 * size.hidden * size.ffn)
