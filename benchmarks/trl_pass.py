"""The pass of TRL's asynchronous GRPO trainer, from the parts that it is made of: prefix tries and a fused LM head.

It imports TRL when it is prepared, so that the other passes run without it. Beside the trainer's own loop nothing is
left out that costs time: tries from samples, their tensors, attention along them, log-probabilities and entropy in
one fused head, its clipped loss, backward. On a GPU attention is TRL's own, with a kernel from the Hub; a CPU has no
such kernel, and torch's attention stands in, segment by segment. There TRL's head also scores every position and not
only the trained ones, so that a CPU checks the gradient and says little about speed.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from passes import Budget, Step
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from condensegrpo.core.trajectory import Segment

MISSING = (
    "TRL is not compared: it is not installed. pip install 'trl>=1.16', and on a GPU also kernels for its attention"
)
EPSILON = 0.2  # of the clipped ratio, as the objective of the other passes


def missing(device: str) -> bool:
    """Whether TRL, or on a GPU the package that fetches its attention, is not installed."""
    return any(find_spec(name) is None for name in (("trl",) if device == "cpu" else ("trl", "kernels")))


def trl_trie(model: PreTrainedModel, budget: Budget, _: Sequence[Segment]) -> Step:
    """TRL's pass: a trie of the rows of a micro-batch, its tree attention, its fused head."""
    from trl.experimental.async_grpo import packing
    from trl.trainer.utils import add_fused_lm_head

    if budget.device == "cpu":
        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    packing.register_tree_attention()
    model.set_attn_implementation(packing.TREE_ATTENTION)
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))

    def step(rows: Sequence[Segment]) -> None:
        for trie in _tries(packing.TreeRow, rows, budget.tokens):
            packed = {name: tensor.to(model.device) for name, tensor in trie.pack().items()}
            _loss(model, packed).backward()

    return step


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    *_: int,
    softmax_scale: float,
    **_options: object,
) -> Tensor:
    """What flash attention computes of segments behind each other: causal, a segment's last query at its last key.

    Args:
        query: (Σ Q, heads, size).
        key: (Σ K, key heads, size), as ``value``.
        starts_q: (segments + 1,) where each segment's queries begin.
    """
    outputs = []
    bounds_q, bounds_k = starts_q.tolist(), starts_k.tolist()
    for first_q, last_q, first_k, last_k in zip(bounds_q[:-1], bounds_q[1:], bounds_k[:-1], bounds_k[1:], strict=True):
        queries, keys = last_q - first_q, last_k - first_k
        visible = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        parts = (
            tensor[first:last].transpose(0, 1)[None]
            for tensor, first, last in ((query, first_q, last_q), (key, first_k, last_k), (value, first_k, last_k))
        )
        attended = functional.scaled_dot_product_attention(
            *parts, attn_mask=visible, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def _tries(trie: Any, rows: Sequence[Segment], budget: int) -> Iterator[Any]:  # noqa: ANN401  TRL is not typed
    """The rows in tries of at most ``budget`` different tokens, in order, as TRL's planner fills them for one rank.

    The advantage carries the row's weight, which TRL would divide by afterwards.
    """
    current = trie()
    for row in rows:
        logprobs = [0.0] * len(row.token_ids)
        mask = [False] * len(row.token_ids)
        for turn in row.turns:
            logprobs[turn.start : turn.positions.stop] = turn.logprobs
            mask[turn.start : turn.positions.stop] = [True] * len(turn.logprobs)
        sample = {
            "input_ids": torch.tensor(row.token_ids),
            "completion_mask": torch.tensor(mask),
            "old_log_probs": torch.tensor(logprobs),
            "advantage": _of_the_row(row),
            "group_id": row.trajectory.rpartition("/")[0],
        }
        if current.samples and not current.fits(sample, budget):
            yield current
            current = trie()
        current.add(sample)
    yield current


def _of_the_row(row: Segment) -> float:
    """Weight · advantage of its trained tokens, which the benchmark's rows have in common."""
    (product,) = {turn.advantage * turn.weight for turn in row.turns}
    return product


def _loss(model: PreTrainedModel, packed: dict[str, Tensor]) -> Tensor:
    """Σ w·l; the first update of a batch, so that the old log-probabilities are the pass's own and the ratio is 1."""
    longest_q, longest_k = packed["tree_max_seqlens"].tolist()
    outputs = model(
        input_ids=packed["input_ids"][None],
        position_ids=packed["position_ids"][None],
        shift_labels=packed["shift_labels"][None],
        fused_lm_head=True,
        tree_kv_index=packed["tree_kv_index"],
        tree_cu_seqlens_q=packed["tree_cu_seqlens_q"],
        tree_cu_seqlens_k=packed["tree_cu_seqlens_k"],
        tree_max_seqlen_q=longest_q,
        tree_max_seqlen_k=longest_k,
    )
    logp = outputs.log_probs.flatten()[packed["token_index"]]
    ratio = torch.exp(logp - logp.detach())
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    loss: Tensor = -torch.min(ratio * packed["advantages"], clipped * packed["advantages"]).sum()
    return loss
