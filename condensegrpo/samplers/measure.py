"""The log-probabilities of given replies: one pass over prompts and replies, no token is drawn.

Legend: _B rows of the batch, _L the longest row, _A the longest reply, _V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

PAD = 0  # any id of the vocabulary: the mask alone says where rows are padded


@torch.no_grad()
def logprobs_of(
    model: Any,  # noqa: ANN401  transformers' classes are untyped
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[tuple[float, ...]]:
    """log π(o_i | c, o_0 … o_(i−1)) of every reply token, in nats at temperature 1, computed in fp32.

    Rows are padded on the left, so that all replies end at the last position and logits are computed for them alone.

    Args:
        pairs: (prompt ids, reply ids), neither empty.
    """
    rows = [(*prompt, *reply) for prompt, reply in pairs]
    longest, most = max(map(len, rows)), max(len(reply) for _, reply in pairs)
    ids_BL = torch.tensor([[PAD] * (longest - len(row)) + list(row) for row in rows], device=model.device)
    mask_BL = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    logits_BAV = model(
        input_ids=ids_BL,
        attention_mask=mask_BL,
        position_ids=(mask_BL.cumsum(dim=1) - 1).clamp(min=0),
        logits_to_keep=most + 1,
        use_cache=False,
    ).logits[:, -most - 1 : -1]
    logp_BA = logits_BAV.float().log_softmax(dim=-1).gather(2, ids_BL[:, -most:, None])[..., 0]
    return [tuple(row[most - len(reply) :]) for row, (_, reply) in zip(logp_BA.tolist(), pairs, strict=True)]


def padded_batches(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Consecutive rows whose number times their longest is at most ``most``; one row alone may be longer.

    Lengths 3 4 9 2 and at most 9 ─▶ 0:2, 2:3, 3:4
    """
    start = longest = 0
    for row, length in enumerate(lengths):
        if row > start and max(longest, length) * (row - start + 1) > most:
            yield slice(start, row)
            start, longest = row, 0
        longest = max(longest, length)
    if lengths:
        yield slice(start, len(lengths))
