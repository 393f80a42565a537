"""Attention of a few queries, computed from a model's queries and keys after RoPE; no L × L tensor is made.

An **attention query** is a prompt followed by two short branches, computed in one pass:

    prompt        t0 t1 t2 … t(P−1)    some of its tokens (the last output) may be queries too
    question      q0 q1 …              repeated: attends to the prompt and itself
    calibration   b0 b1 …              text without content: attends to the prompt and itself, not to the question

Both branches have the positions P, P+1, …. The result is the attention that each prompt token receives from them:

    a_j = mean over layers and heads of  ½ · mean over i in the question of α_ij + ½ · mean over i in the prompt of α_ij
    α_ij = softmax_j(q_i · k_j / √d)

Question and last output have equal weight whatever their lengths; without queries in the prompt the question has all.

Queries and keys come from transformers' attention-function registry, which every supported model calls with its
scaling, soft cap and window. For w queries the cost on top of the model's own pass is O(w·L) a layer, in time
and in memory. Layers with a window or a soft cap compute their prompt in chunks of ``CHUNK`` queries.

Legend: B attention queries, L tokens of the longest, W most query tokens of one, h query heads, g key heads, d their
size.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from condensegrpo.core.protocols.sampler import AttentionQuery, TokenAttention

NAME = "sdpa_captured"  # of this attention function in transformers' registry
# model types whose captured attention is compared with output_attentions in tests/test_capture.py, and of models that
# see in tests/test_vision_sampling.py
SUPPORTED = (
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "qwen2",
    "qwen2_5_vl_text",
    "qwen3",
    "qwen3_vl_text",
)
CHUNK = 256  # queries of the prompt computed at once where a window or a soft cap rules out sdpa
PROMPT, QUESTION, CALIBRATION, PADDING = range(4)  # the branch of a token
DecoderInputs = Callable[[Tensor, Tensor], Mapping[str, Any]]


class QueryRows(NamedTuple):
    """The tokens of a batch of attention queries, as rows."""

    ids: Tensor  # (B, L) int64
    position: Tensor  # (B, L) int64, in the row's prompt or branch
    branch: Tensor  # (B, L) int64
    query_index: Tensor  # (B, W) int64, of the query tokens: those of the prompt and of both branches
    weight: Tensor  # (B, W, 2) of a query token in the attention of the question and of the calibration; sums to 1


@dataclass(slots=True)
class Capture:
    """Input of the attention function of every layer, and the attention that the captured layers add to it."""

    rows: QueryRows
    layers: frozenset[int]
    attention: list[Tensor] = field(default_factory=list)  # (B, 2, L) per captured layer


def default_layers(count: int) -> tuple[int, ...]:
    """Up to three layers from the middle to near the end of ``count``: 2 ─▶ 1;  28 ─▶ 14, 18, 23."""
    return tuple(sorted({count // 2, count * 2 // 3, count * 5 // 6}))


def check_supported(model_type: str) -> None:
    """Check that attention can be captured from models of this type."""
    if model_type not in SUPPORTED:
        raise ValueError(
            f"capturing attention from a model of type {model_type!r}: verified are {', '.join(SUPPORTED)}. Name a "
            f"frozen model of one of these as the scorer (condenser.options.scorer=path)."
        )


def check_layers(layers: Collection[int], count: int) -> None:
    """Check that a model with ``count`` layers has all of these."""
    if not set(layers) <= set(range(count)):
        raise ValueError(f"capturing attention of the layers {sorted(layers)}: the model has {count}, counted from 0")


@torch.no_grad()
def attend(
    model: PreTrainedModel, queries: Sequence[AttentionQuery], inputs: DecoderInputs | None = None
) -> tuple[TokenAttention, ...]:
    """The attention of each attention query.

    Args:
        model: in evaluation mode; its attention function is replaced during the call.
        queries: all with the same layers.
        inputs: makes the decoder's arguments of ids and positions (B, L), with pictures in place; None: they show none.
    """
    config = model.config.get_text_config()
    check_supported(config.model_type)
    layers = frozenset(queries[0].layers or default_layers(config.num_hidden_layers))
    check_layers(layers, config.num_hidden_layers)
    capture = Capture(rows=query_rows(queries, device=model.device), layers=layers)
    rows, decoder = capture.rows, model.get_decoder()
    given = inputs(rows.ids, rows.position) if inputs else {"input_ids": rows.ids, "position_ids": rows.position}
    implementation = decoder.config._attn_implementation
    decoder.set_attn_implementation(NAME)
    try:
        decoder(
            **given,
            # a mask of four dimensions keeps transformers from making one of L × L
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device),
            use_cache=False,
            capture=capture,
        )
    finally:
        decoder.set_attn_implementation(implementation)
    mean_B2L = torch.stack(capture.attention).mean(dim=0).cpu()
    return tuple(
        TokenAttention(
            question=tuple(row[0, : len(query.prompt_ids)].tolist()),
            calibration=tuple(row[1, : len(query.prompt_ids)].tolist()),
        )
        for row, query in zip(mean_B2L, queries, strict=True)
    )


def query_rows(queries: Sequence[AttentionQuery], *, device: torch.device | str = "cpu") -> QueryRows:
    """The attention queries as rows, padded on the right, where no query token attends.

    Prompt 5 6 7, question 8, calibration 9, a query token at position 2:

        ids 5 6 7 8 9   position 0 1 2 3 3   branch 0 0 0 1 2   query_index 2 3 4   weight ½ ½ 0  and  0 0 1
    """
    columns = zip(*map(_row, queries), strict=True)
    paddings = (0, 0, PADDING, None, 0.0, 0.0)
    ids, position, branch, index, question, calibration = (
        _padded(column, padding).to(device) for column, padding in zip(columns, paddings, strict=True)
    )
    return QueryRows(ids, position, branch, index, torch.stack((question, calibration), dim=-1))


def _row(query: AttentionQuery) -> tuple[Sequence[float], ...]:
    """Ids, positions, branches and query tokens of one, and their weights for the question and for the calibration."""
    prompt, question, calibration = len(query.prompt_ids), len(query.question_ids), len(query.calibration_ids)
    chosen, half = len(query.positions), 0.5 if query.positions else 1.0
    return (
        (*query.prompt_ids, *query.question_ids, *query.calibration_ids),
        [*range(prompt + question), *range(prompt, prompt + calibration)],
        [PROMPT] * prompt + [QUESTION] * question + [CALIBRATION] * calibration,
        [*query.positions, *range(prompt, query.length)],
        [0.5 / chosen for _ in query.positions] + [half / question] * question + [0.0] * calibration,
        [0.0] * (chosen + question) + [1 / calibration] * calibration,
    )


def _padded(rows: Sequence[Sequence[float]], padding: float | None) -> Tensor:
    """Rows padded to one length; without a padding value with their last value."""
    longest = max(map(len, rows))
    ends = [row[-1] if padding is None else padding for row in rows]
    return torch.tensor([[*row, *[end] * (longest - len(row))] for row, end in zip(rows, ends, strict=True)])


def capturing_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    capture: Capture | None = None,
    **others: Any,  # noqa: ANN401  # each model passes its own arguments
) -> tuple[Tensor, None]:
    """Attention function of a decoder layer: queries (B, h, L, d), keys and values (B, g, L, d), output (B, L, h, d).

    Args:
        capture: without it this is transformers' ``sdpa``.
        others: of the layer; ``scaling``, ``softcap`` and ``sliding_window`` are used.
    """
    if capture is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **others)
        return plain
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scaling, softcap, window = (others.get(name) for name in ("scaling", "softcap", "sliding_window"))
    output = _causal(query, key, value, scaling=scaling, softcap=softcap, window=window)
    index_BWd = capture.rows.query_index[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[-1])
    weights = _softmax(
        query.gather(2, index_BWd), key, _visible(capture.rows, window), scaling=scaling, softcap=softcap
    )  # (B, h, W, L)
    output.scatter_(2, index_BWd, weights.to(value.dtype) @ value)
    if module.layer_idx in capture.layers:
        capture.attention.append(torch.einsum("bwl,bwk->bkl", weights.mean(dim=1), capture.rows.weight))
    return output.transpose(1, 2).contiguous(), None


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """The outputs (B, h, L, d) of causal attention over rows: correct for the prompt; the branches are set later."""
    length = query.shape[2]
    if softcap is None and (window is None or length <= window):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    outputs = []
    for start in range(0, length, CHUNK):
        end = min(start + CHUNK, length)
        first = 0 if window is None else max(start - window + 1, 0)
        ahead = torch.arange(start, end, device=key.device)[:, None] - torch.arange(first, end, device=key.device)
        visible = (ahead >= 0) & (ahead < (window or length))
        keys = key[:, :, first:end]
        weights = _softmax(query[:, :, start:end], keys, visible[None], scaling=scaling, softcap=softcap)
        outputs.append(weights.to(value.dtype) @ value[:, :, first:end])
    return torch.cat(outputs, dim=2)


def _softmax(query: Tensor, key: Tensor, visible: Tensor, *, scaling: float | None, softcap: float | None) -> Tensor:
    """softmax(cap(q·k·scaling)) over the visible keys (B or 1, Q, K), in fp32: (B, h, Q, K)."""
    logits = (query @ key.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.masked_fill(~visible[:, None], -torch.inf).softmax(dim=-1)


def _visible(rows: QueryRows, window: int | None) -> Tensor:
    """Whether each query token attends to each token of its row: (B, W, L)."""
    index, branch, position = rows.query_index, rows.branch, rows.position
    length = branch.shape[1]
    earlier = torch.arange(length, device=branch.device) <= index[:, :, None]
    same_branch = branch.gather(1, index)[:, :, None] == branch[:, None]
    visible = earlier & (same_branch | (branch[:, None] == PROMPT))
    if window is not None:
        visible &= position.gather(1, index)[:, :, None] - position[:, None] < window
    return visible


AttentionInterface.register(NAME, capturing_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
