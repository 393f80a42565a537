"""Packing: rows of training data into micro-batches of a token budget. Torch only; no model, no device choice.

Rows lie behind each other in one long row, and positions start again at 0 in each, which keeps them apart in attention
(block-diagonal). There is no padding, so that nothing has to be told from it by its id.

Legend of the suffixes: ``_1S`` one row of S packed tokens, ``_T`` the trained ones among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from condensegrpo.errors import LearnerError
from condensegrpo.trajectory import Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch. Columns of trained tokens hold nothing else: no loss or ratio of a context token can exist.

    ``old`` and ``reference`` are the sampler's log-probabilities until the learner measures others.
    """

    token_ids: Tensor  # (1, S) int64
    position_ids: Tensor  # (1, S) int64, from 0 in every row
    source: Tensor  # (T,) int64, the place in S whose logits predict the token: the one before it
    target: Tensor  # (T,) int64, the token's id
    turns: Tensor  # (T,) int64, the turn that sampled the token: a number of its own for every turn of the micro-batch
    logprobs: Tensor  # (T,) float32, nats, of the sampler
    old: Tensor  # (T,) float32, nats, under the weights that ratios are taken against
    reference: Tensor  # (T,) float32, nats, of the policy that the KL term is measured to
    advantages: Tensor  # (T,) float32
    weights: Tensor  # (T,) float32, in the optimiser step's loss

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device."""
        return replace(self, **{column.name: getattr(self, column.name).to(device) for column in fields(self)})


def pack(lengths: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches of row indices: each row in exactly one, none over the budget, no row split.

    First-fit decreasing: the longest row first, each into the first micro-batch with room for it; at most 11/9 of the
    best possible number of micro-batches, plus one. Deterministic; equal lengths go by index.

    Example: lengths [3, 9, 5, 2] under a budget of 10 give ((1,), (0, 2, 3)).

    Raises:
        LearnerError: a row alone is over the budget.
    """
    rooms: list[int] = []
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = lengths[row]
        if length > max_tokens:
            raise LearnerError(
                f"packing {len(lengths)} rows: row {row} has {length} tokens and a micro-batch may hold {max_tokens}. "
                f"Rows are never split: set learner.tokens_per_micro_batch to at least {max(lengths)}, or let contexts "
                f"and replies be shorter."
            )
        place = next((place for place, room in enumerate(rooms) if room >= length), None)
        if place is None:
            rooms.append(max_tokens - length)
            batches.append([row])
        else:
            rooms[place] -= length
            batches[place].append(row)
    return tuple(tuple(sorted(batch)) for batch in batches)


def collate(segments: Sequence[Segment]) -> PackedBatch:
    """The rows behind each other as one micro-batch.

    Example: rows [5 6 7*] and [8 9*] (trained where starred) give

        token_ids    5 6 7 8 9
        position_ids 0 1 2 0 1
        source       1 3            6 predicts 7, 8 predicts 9
        target       7 9
        turns        0 1

    Raises:
        LearnerError: a trained token stands at the start of its row, where nothing predicts it.
    """
    if not segments:
        raise ValueError("a micro-batch needs at least one row; a rank without rows takes dummy()")
    for number, segment in enumerate(segments):
        if segment.trained[:1] == (True,):
            raise LearnerError(
                f"packing row {number} (trajectory {segment.trajectory!r}, from turn {segment.first_turn}): its first "
                f"token is to be trained and has no context, wanted at least one token of prompt before it."
            )
    trained_S = torch.tensor([flag for segment in segments for flag in segment.trained], dtype=torch.bool)
    target_place_T = trained_S.nonzero().flatten()
    token_ids_S = torch.tensor([token for segment in segments for token in segment.token_ids], dtype=torch.int64)
    logprobs_T = _column([segment.logprobs for segment in segments])[target_place_T]
    return PackedBatch(
        token_ids=token_ids_S[None],
        position_ids=torch.cat([torch.arange(len(segment.token_ids)) for segment in segments])[None],
        source=target_place_T - 1,
        target=token_ids_S[target_place_T],
        turns=_turn_numbers(segments),
        logprobs=logprobs_T,
        old=logprobs_T,
        reference=logprobs_T,
        advantages=_column([segment.advantages for segment in segments])[target_place_T],
        weights=_column([segment.weights for segment in segments])[target_place_T],
    )


def dummy() -> PackedBatch:
    """A micro-batch that changes nothing: two tokens, the second trained with advantage 0 and weight 0.

    For ranks with fewer micro-batches than the others: forward and backward run through every parameter and add a
    gradient of exactly zero, so that collective operations of the ranks stay in step.
    """
    return collate(
        [
            Segment(
                token_ids=(0, 0),
                trained=(False, True),
                logprobs=(0.0, 0.0),
                advantages=(0.0, 0.0),
                weights=(0.0, 0.0),
                trajectory="",
                first_turn=0,
            )
        ]
    )


def _turn_numbers(segments: Sequence[Segment]) -> Tensor:
    """The number (T,) of the turn that sampled each trained token, counted over all rows."""
    turns = [
        (row, turn)
        for row, segment in enumerate(segments)
        for turn, trained in zip(
            segment.turns or (segment.first_turn,) * len(segment.trained), segment.trained, strict=True
        )
        if trained
    ]
    number = {turn: place for place, turn in enumerate(dict.fromkeys(turns))}
    return torch.tensor([number[turn] for turn in turns], dtype=torch.int64)


def _column(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float32)
