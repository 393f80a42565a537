"""Attention of a few queries, taken from a model's own queries and keys after RoPE; no L × L tensor is made.

A **reading** is a trunk followed by two short branches, computed in one pass:

    trunk   t0 t1 t2 … t(P−1)          the prompt; some of its tokens (the last output) may be queries too
    branch  q0 q1 …                    the question repeated: attends to the trunk and itself
    branch  b0 b1 …                    text without content: attends to the trunk and itself, not to the question

Both branches have the positions P, P+1, …. The result is the attention that each trunk token receives from them:

    a_j = mean over layers and heads of  ½ · mean over i in the question of α_ij + ½ · mean over i in the trunk of α_ij
    α_ij = softmax_j(q_i · k_j / √d)

Question and last output have equal weight whatever their lengths; without queries in the trunk the question has all.

Queries and keys come from transformers' attention-function registry, which every supported model calls with its
scaling, soft cap and window. For w queries the cost on top of the model's own pass is O(w·L) a layer, in time
and in memory. Layers with a window or a soft cap compute their trunk in chunks of ``CHUNK`` queries.

Legend: B readings, L places of the longest, W most queries of one reading, h query heads, g key heads, d their size.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from condensegrpo.core.protocols import Reading, TokenAttention

NAME = "sdpa_captured"  # of this attention function in transformers' registry
SUPPORTED = (  # model types whose captured attention is compared with output_attentions in tests/test_capture.py
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
)
CHUNK = 256  # queries of the trunk computed at once where a window or a soft cap rules out sdpa
TRUNK, QUERY, BLANK, PADDING = range(4)  # the branch of a place


class Layout(NamedTuple):
    """The tokens of a batch of readings, as rows."""

    ids: Tensor  # (B, L) int64
    position: Tensor  # (B, L) int64, in the reading
    branch: Tensor  # (B, L) int64
    place: Tensor  # (B, W) int64, of the queries computed here: those of the trunk and of both branches
    weight: Tensor  # (B, W, 2) weight of a query in the attention of the question and in that of the blank; sums to 1


@dataclass(slots=True)
class Capture:
    """Input of the attention function of every layer, and the attention that the captured layers add to it."""

    layout: Layout
    layers: frozenset[int]
    attention: list[Tensor] = field(default_factory=list)  # (B, 2, L) per captured layer


def default_layers(count: int) -> tuple[int, ...]:
    """Up to three layers from the middle to near the end of ``count``: 2 ─▶ 1;  28 ─▶ 14, 18, 23."""
    return tuple(sorted({count // 2, count * 2 // 3, count * 5 // 6}))


def check_supported(model_type: str) -> None:
    """Check that attention can be captured from models of this type.

    Raises:
        ValueError: capturing was not verified for this type.
    """
    if model_type not in SUPPORTED:
        raise ValueError(
            f"capturing attention from a model of type {model_type!r}: verified are {', '.join(SUPPORTED)}. Name a "
            f"frozen model of one of these as the scorer (condenser.options.scorer=path)."
        )


def check_layers(layers: Collection[int], count: int) -> None:
    """Check that a model with ``count`` layers has all of these.

    Raises:
        ValueError: a layer is out of range.
    """
    if not set(layers) <= set(range(count)):
        raise ValueError(f"capturing attention of the layers {sorted(layers)}: the model has {count}, counted from 0")


@torch.no_grad()
def attend(model: PreTrainedModel, readings: Sequence[Reading]) -> tuple[TokenAttention, ...]:
    """The attention of each reading.

    Args:
        model: in evaluation mode; its attention function is replaced during the call.
        readings: all with the same layers.

    Raises:
        ValueError: the model's type is not supported, or it has no such layer.
    """
    config = model.config.get_text_config()
    check_supported(config.model_type)
    layers = frozenset(readings[0].layers or default_layers(config.num_hidden_layers))
    check_layers(layers, config.num_hidden_layers)
    capture = Capture(layout=lay_out(readings, device=model.device), layers=layers)
    implementation = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        model.base_model(
            input_ids=capture.layout.ids,
            position_ids=capture.layout.position,
            # a mask of four dimensions keeps transformers from making one of L × L
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device),
            use_cache=False,
            capture=capture,
        )
    finally:
        model.set_attn_implementation(implementation)
    mean_B2L = torch.stack(capture.attention).mean(dim=0).cpu()
    return tuple(
        TokenAttention(
            question=tuple(row[0, : len(reading.trunk_ids)].tolist()),
            blank=tuple(row[1, : len(reading.trunk_ids)].tolist()),
        )
        for row, reading in zip(mean_B2L, readings, strict=True)
    )


def lay_out(readings: Sequence[Reading], *, device: torch.device | str = "cpu") -> Layout:
    """The readings as rows, padded on the right, where no query of a reading attends.

    Trunk 5 6 7, question 8, blank 9, a query at place 2:

        ids 5 6 7 8 9   position 0 1 2 3 3   branch 0 0 0 1 2   place 2 3 4   weight ½ ½ 0  and  0 0 1
    """
    rows = [(*reading.trunk_ids, *reading.question_ids, *reading.blank_ids) for reading in readings]
    places = [
        [*reading.asked, *range(len(reading.trunk_ids), len(row))] for reading, row in zip(readings, rows, strict=True)
    ]
    sizes = [(len(each.trunk_ids), len(each.question_ids), len(each.blank_ids)) for each in readings]
    positions = [[*range(trunk + question), *range(trunk, trunk + blank)] for trunk, question, blank in sizes]
    branches = [[TRUNK] * trunk + [QUERY] * question + [BLANK] * blank for trunk, question, blank in sizes]
    weights = [_padded(column, 0.0) for column in zip(*map(_weights, readings), strict=True)]
    return Layout(
        ids=_padded(rows, 0).to(device),
        position=_padded(positions, 0).to(device),
        branch=_padded(branches, PADDING).to(device),
        place=_padded(places, None).to(device),
        weight=torch.stack(weights, dim=-1).to(device),
    )


def _padded(rows: Sequence[Sequence[float]], padding: float | None) -> Tensor:
    """Rows padded to one length; without a padding value with their last value."""
    longest = max(map(len, rows))
    ends = [row[-1] if padding is None else padding for row in rows]
    return torch.tensor([[*row, *[end] * (longest - len(row))] for row, end in zip(rows, ends, strict=True)])


def _weights(reading: Reading) -> tuple[list[float], list[float]]:
    """The weight of each query in the attention of the question, and in that of the blank."""
    asked, question, blank = len(reading.asked), len(reading.question_ids), len(reading.blank_ids)
    share = 0.5 if asked else 1.0
    return (
        [0.5 / asked for _ in reading.asked] + [share / question] * question + [0.0] * blank,
        [0.0] * (asked + question) + [1 / blank] * blank,
    )


def attention(
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
    output = _trunk(query, key, value, capture.layout, scaling=scaling, softcap=softcap, window=window)
    place_BWd = capture.layout.place[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[-1])
    weights = _softmax(
        query.gather(2, place_BWd), key, _visible(capture.layout, window), scaling=scaling, softcap=softcap
    )  # (B, h, W, L)
    output.scatter_(2, place_BWd, weights.to(value.dtype) @ value)
    if module.layer_idx in capture.layers:
        capture.attention.append(torch.einsum("bwl,bwk->bkl", weights.mean(dim=1), capture.layout.weight))
    return output.transpose(1, 2).contiguous(), None


def _trunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """The outputs (B, h, L, d) of causal attention over places: correct for the trunk; the branches are set later."""
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


def _visible(layout: Layout, window: int | None) -> Tensor:
    """Whether each query attends to each place: (B, W, L)."""
    place, branch, position = layout.place, layout.branch, layout.position
    length = branch.shape[1]
    earlier = torch.arange(length, device=branch.device) <= place[:, :, None]
    own = branch.gather(1, place)[:, :, None] == branch[:, None]
    visible = earlier & (own | (branch[:, None] == TRUNK))
    if window is not None:
        visible &= position.gather(1, place)[:, :, None] - position[:, None] < window
    return visible


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
