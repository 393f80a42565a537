"""Attention of a few queries, taken from a model's own queries and keys after RoPE; no L × L tensor is made.

A **reading** is a trunk with two short branches behind it, computed in one pass:

    trunk   t0 t1 t2 … t(P−1)          the prompt; some of its tokens (the last output) may be asked too
    branch  q0 q1 …                    the question once more: sees the trunk and itself
    branch  b0 b1 …                    something without content: sees the trunk and itself, not the question

Both branches have the positions P, P+1, …. What comes back is how much of their attention each trunk token gets:

    a_j = mean over layers and heads of  ½ · mean over the question's i of α_ij + ½ · mean over the asked i of α_ij
    α_ij = softmax_j(q_i · k_j / √d)

Question and last output weigh the same, however long each is; where nothing is asked in the trunk the question is all.

Queries and keys come from transformers' attention-function registry, where every supported model hands them over with
its scaling, soft cap and window. For w asked queries the cost beside the model's own pass is O(w·L) a layer, in time
and in memory. Layers with a window or a soft cap compute their trunk in pieces of ``PIECE`` queries.

Legend: B readings, L places of the longest, W most queries of one reading, h query heads, g key heads, d their size.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from condensegrpo.core.protocols import Reading, TokenAttention

NAME = "sdpa_watched"  # what transformers calls this attention
SUPPORTED = (  # model types whose captured attention is compared with output_attentions in tests/test_capture.py
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
)
PIECE = 256  # queries of the trunk that are computed at once where a window or a soft cap rules out sdpa
TRUNK, QUERY, BLANK, PADDING = range(4)  # the branch of a place


class Layout(NamedTuple):
    """Where the tokens of some readings lie."""

    ids: Tensor  # (B, L) int64
    position: Tensor  # (B, L) int64, in the reading
    branch: Tensor  # (B, L) int64
    place: Tensor  # (B, W) int64, of the queries whose attention is computed by hand: those asked and all of a branch
    weight: Tensor  # (B, W, 2) what a query adds to the attention of the question and to that of the blank; sums to 1


@dataclass(slots=True)
class Watch:
    """What goes into the attention function of every layer, and what the watched ones leave there."""

    layout: Layout
    layers: frozenset[int]
    seen: list[Tensor] = field(default_factory=list)  # one (B, 2, L) a watched layer


def default_layers(count: int) -> tuple[int, ...]:
    """A few layers from the middle to near the end of ``count``: 2 ─▶ 1;  28 ─▶ 14, 18, 23."""
    return tuple(sorted({count // 2, count * 2 // 3, count * 5 // 6}))


def check_supported(model_type: str) -> None:
    """Check that attention can be captured from models of this type.

    Raises:
        ValueError: it has not been verified for them.
    """
    if model_type not in SUPPORTED:
        raise ValueError(
            f"capturing attention from a model of type {model_type!r}: verified are {', '.join(SUPPORTED)}. Name a "
            f"frozen model of one of these as the scorer (condenser.options.scorer=path)."
        )


def check_layers(layers: Collection[int], count: int) -> None:
    """Check that a model with ``count`` layers has all of these.

    Raises:
        ValueError: it has not.
    """
    if not set(layers) <= set(range(count)):
        raise ValueError(f"watching the layers {sorted(layers)}: the model has {count}, from 0 on")


@torch.no_grad()
def attend(model: PreTrainedModel, readings: Sequence[Reading]) -> tuple[TokenAttention, ...]:
    """What the model looks at in each reading.

    Args:
        model: in evaluation mode; its attention function is replaced meanwhile.
        readings: with the same layers.

    Raises:
        ValueError: the model's type is not supported, or it has no such layer.
    """
    config = model.config.get_text_config()
    check_supported(config.model_type)
    layers = frozenset(readings[0].layers or default_layers(config.num_hidden_layers))
    check_layers(layers, config.num_hidden_layers)
    watch = Watch(layout=lay_out(readings, device=model.device), layers=layers)
    with _watched(model):
        model.base_model(
            input_ids=watch.layout.ids,
            position_ids=watch.layout.position,
            # a mask of four dimensions keeps transformers from making one of L × L
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device),
            use_cache=False,
            watch=watch,
        )
    mean_B2L = torch.stack(watch.seen).mean(dim=0).cpu()
    return tuple(
        TokenAttention(
            question=tuple(row[0, : len(reading.trunk_ids)].tolist()),
            blank=tuple(row[1, : len(reading.trunk_ids)].tolist()),
        )
        for row, reading in zip(mean_B2L, readings, strict=True)
    )


def lay_out(readings: Sequence[Reading], *, device: torch.device | str = "cpu") -> Layout:
    """The readings as rows, filled up on the right, where no query that counts can see.

    Trunk 5 6 7, question 8, blank 9, asked place 2:

        ids 5 6 7 8 9   position 0 1 2 3 3   branch 0 0 0 1 2   place 2 3 4   weight ½ ½ 0  and  0 0 1
    """
    rows = [(*one.trunk_ids, *one.question_ids, *one.blank_ids) for one in readings]
    places = [[*one.asked, *range(len(one.trunk_ids), len(row))] for one, row in zip(readings, rows, strict=True)]
    weights = [_filled(column, 0.0) for column in zip(*map(_weights, readings), strict=True)]
    return Layout(
        ids=_filled(rows, 0).to(device),
        position=_filled([_positions(one) for one in readings], 0).to(device),
        branch=_filled([_branches(one) for one in readings], PADDING).to(device),
        place=_filled(places, None).to(device),
        weight=torch.stack(weights, dim=-1).to(device),
    )


def _filled(rows: Sequence[Sequence[float]], filling: float | None) -> Tensor:
    """Rows of one length; without a filling a row is filled up with its last value."""
    longest = max(map(len, rows))
    ends = [row[-1] if filling is None else filling for row in rows]
    return torch.tensor([[*row, *[end] * (longest - len(row))] for row, end in zip(rows, ends, strict=True)])


def _positions(one: Reading) -> list[int]:
    trunk = len(one.trunk_ids)
    return [*range(trunk + len(one.question_ids)), *range(trunk, trunk + len(one.blank_ids))]


def _branches(one: Reading) -> list[int]:
    return [TRUNK] * len(one.trunk_ids) + [QUERY] * len(one.question_ids) + [BLANK] * len(one.blank_ids)


def _weights(one: Reading) -> tuple[list[float], list[float]]:
    """What each query of a reading adds to the attention of the question, and what to that of the blank."""
    asked, question, blank = len(one.asked), len(one.question_ids), len(one.blank_ids)
    behind = 0.5 if asked else 1.0
    return (
        [0.5 / asked for _ in one.asked] + [behind / question] * question + [0.0] * blank,
        [0.0] * (asked + question) + [1 / blank] * blank,
    )


@contextmanager
def _watched(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    watch: Watch | None = None,
    **others: Any,  # noqa: ANN401  # whatever layers of one model or another pass on
) -> tuple[Tensor, None]:
    """What a decoder layer calls with queries (B, h, L, d), keys and values (B, g, L, d); the output is (B, L, h, d).

    Args:
        watch: without it this is transformers' ``sdpa``.
        others: of the layer; ``scaling``, ``softcap`` and ``sliding_window`` count.
    """
    if watch is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **others)
        return found
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scaling, softcap, window = (others.get(name) for name in ("scaling", "softcap", "sliding_window"))
    output = _trunk(query, key, value, watch.layout, scaling=scaling, softcap=softcap, window=window)
    place_BWd = watch.layout.place[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[-1])
    weights = _softmax(
        query.gather(2, place_BWd), key, _visible(watch.layout, window), scaling=scaling, softcap=softcap
    )  # (B, h, W, L)
    output.scatter_(2, place_BWd, weights.to(value.dtype) @ value)
    if module.layer_idx in watch.layers:
        watch.seen.append(torch.einsum("bwl,bwk->bkl", weights.mean(dim=1), watch.layout.weight))
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
    """The outputs (B, h, L, d) of causal attention over places, right for the trunk; the branches are put in later."""
    length = query.shape[2]
    if softcap is None and (window is None or length <= window):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    outputs = []
    for start in range(0, length, PIECE):
        end = min(start + PIECE, length)
        first = 0 if window is None else max(start - window + 1, 0)
        ahead = torch.arange(start, end, device=key.device)[:, None] - torch.arange(first, end, device=key.device)
        visible = (ahead >= 0) & (ahead < (window or length))
        keys = key[:, :, first:end]
        weights = _softmax(query[:, :, start:end], keys, visible[None], scaling=scaling, softcap=softcap)
        outputs.append(weights.to(value.dtype) @ value[:, :, first:end])
    return torch.cat(outputs, dim=2)


def _softmax(query: Tensor, key: Tensor, visible: Tensor, *, scaling: float | None, softcap: float | None) -> Tensor:
    """softmax(cap(q·k·scaling)) over what is visible (B or 1, Q, K), in fp32: (B, h, Q, K)."""
    logits = (query @ key.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.masked_fill(~visible[:, None], -torch.inf).softmax(dim=-1)


def _visible(layout: Layout, window: int | None) -> Tensor:
    """Whether each asked query sees each place: (B, W, L)."""
    place, branch, position = layout.place, layout.branch, layout.position
    length = branch.shape[1]
    earlier = torch.arange(length, device=branch.device) <= place[:, :, None]
    own = branch.gather(1, place)[:, :, None] == branch[:, None]
    seen = earlier & (own | (branch[:, None] == TRUNK))
    if window is not None:
        seen &= position.gather(1, place)[:, :, None] - position[:, None] < window
    return seen


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
