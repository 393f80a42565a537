"""The arithmetic that a gradient or a rollout needs at least, counted by hand.

python benchmarks/flops.py      of what the learner computes in a step, the share that is needed: the largest MFU
"""

from collections.abc import Sequence
from itertools import pairwise

from passes import ModelSize
from workloads import LENGTHS, workload

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


def computed_flops(size: ModelSize, rows: Sequence[Segment], *, shares: bool, checkpointed: int) -> float:
    """Floating-point operations of the learner's pass with a loss per token, those that it does twice included.

    Args:
        checkpointed: decoder layers whose forward pass backward computes again.
        shares: prefixes that rows have in common are computed once.
    """
    alone = sum(useful_flops(size, [row]) for row in rows)
    head = 6.0 * size.hidden * size.vocabulary * sum(row.trained for row in rows)
    decoder = (useful_flops(size, rows) if shares else alone) - head
    return decoder * (1 + checkpointed / size.layers / 3) + head


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


QWEN_7B = ModelSize(layers=28, hidden=3584, heads=28, kv_heads=4, head=128, ffn=18944, vocabulary=152064)


def main() -> None:
    """Print the largest MFU of a learner's step by rows, sharing and checkpointed layers."""
    print("| rows | checkpointed layers | nothing shared | prefixes shared |\n|---|---|---|---|")
    for kind, lengths in LENGTHS.items():
        rows = workload(kind, lengths, questions=1, vocabulary=QWEN_7B.vocabulary, seed=0).rows
        for layers in (QWEN_7B.layers, 22, 0):
            computed = (computed_flops(QWEN_7B, rows, shares=each, checkpointed=layers) for each in (False, True))
            shares = (f"{useful_flops(QWEN_7B, rows) / each:.0%}" for each in computed)
            print(f"| {kind} | {layers} of {QWEN_7B.layers} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
