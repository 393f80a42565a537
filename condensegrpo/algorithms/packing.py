"""Packing: rows of training data into micro-batches of a token budget. Torch only; no model, no device choice.

    rows ─▶ blocks: rows that share a prefix ─▶ micro-batches of whole blocks ─▶ tensors

A block is a prefix tree (``prefix_tree.py``), or a row alone. Blocks follow each other in one long row; positions
start again at 0 in each. There is no padding, so no token id is reserved for it. The positions alone determine which
tokens a token attends to; a model that computes plain rows only gets blocks of one row.

Shared tokens are computed once. The columns of trained tokens have an entry for every token of every row, so loss and
gradient equal those of separate rows.

Rows that show pictures come with names for their tokens (``segments.py``): equal ids of different pictures are no
common prefix.

Legend of the suffixes: ``_1S`` one row of S packed tokens, ``_T`` the trained tokens of all rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from condensegrpo.algorithms.prefix_tree import distinct_tokens, tree, tree_groups
from condensegrpo.algorithms.segments import numbered, reply_row
from condensegrpo.core.errors import LearnerError
from condensegrpo.core.trajectory import Segment

Block = tuple[Segment, ...]  # rows that are laid out together; never split
TREES_A_RANK = 4  # at least so many blocks for each of several ranks, so that they get equal loads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch. Columns of trained tokens have no entries for context tokens: those have no loss and no ratio.

    ``old`` and ``reference`` are the sampler's log-probabilities until the learner measures its own. A token that
    several rows share is one of the S tokens, and one of the T tokens for every row that trains it.
    """

    token_ids: Tensor  # (1, S) int64; negative where pictures are shown, see ``segments.numbered``
    position_ids: Tensor  # (1, S) int64, depth in the row, 0 at the start of every tree and nowhere else
    source: Tensor  # (T,) int64, the index in S whose logits predict the token: the one before it in its row
    target: Tensor  # (T,) int64, the token's id
    turns: Tensor  # (T,) int64, the turn that sampled the token: a number of its own for every turn of the micro-batch
    logprobs: Tensor  # (T,) float32, nats, of the sampler
    old: Tensor  # (T,) float32, nats, under the weights that ratios are taken against
    reference: Tensor  # (T,) float32, nats, of the policy that the KL term is measured to
    advantages: Tensor  # (T,) float32
    weights: Tensor  # (T,) float32, of the token's loss in the optimiser step
    kl_weights: Tensor  # (T,) float32, of its KL term, likewise
    pictures: tuple[str, ...] = ()  # the hashes of those that its tokens show, each once

    @property
    def columns(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {column.name: getattr(self, column.name) for column in fields(self) if column.name != "pictures"}

    def select(self, some_T: slice | Tensor) -> Self:
        """The same tokens with the columns of some of the trained ones: a slice of T, or indices in T."""
        selected: dict[str, Any] = {name: value[some_T] for name, value in self.columns.items() if value.dim() == 1}
        return replace(self, **selected)


def blocks(rows: Sequence[Segment], *, max_tokens: int, share: bool, ranks: int = 1) -> tuple[Block, ...]:
    """The rows in blocks; those that share a prefix in one, as far as the budget allows.

    Args:
        max_tokens: the budget of a micro-batch.
        share: whether the model computes prefix trees; else every row is a block.
        ranks: that will compute the blocks: with several no block is larger than a part of one rank's tokens.
    """
    longest = max(rows, key=lambda row: len(row.token_ids), default=None)
    if longest is not None and len(longest.token_ids) > max_tokens:
        where = f"the row of trajectory {longest.trajectory!r} from turn {longest.first_turn} on"
        raise _too_long(len(rows), where, len(longest.token_ids), max_tokens)
    if not share:
        return tuple((row,) for row in rows)
    ids = [row.token_ids for row in rows]
    if ranks > 1 and longest is not None:
        max_tokens = min(max_tokens, max(len(longest.token_ids), distinct_tokens(ids) // (TREES_A_RANK * ranks)))
    return tuple(tuple(rows[index] for index in group) for group in tree_groups(ids, max_tokens=max_tokens))


def block_tokens(block: Block) -> int:
    """The tokens of a block that go through the model: those that its rows share are counted once."""
    return distinct_tokens([row.token_ids for row in block])


def balanced_owners(sizes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The rank that computes each block, so that the ranks have as many tokens as one block allows.

    As long as that narrows the gap, the rank with most tokens gives the rank with fewest the block that makes the two
    most equal. The gradient does not depend on the rank that computes a block: its weights are those of the whole step.

    Example: a rank with blocks of 6, 5 and 4 tokens gives its first to a rank with 3: ((1, 0, 0), (1,)), 9 each.

    Args:
        sizes: by rank, the tokens of each block that it has.

    Returns:
        By rank, the rank that computes each block that it has.
    """
    owners = [[rank] * len(blocks) for rank, blocks in enumerate(sizes)]
    loads = [sum(blocks) for blocks in sizes]
    while True:
        least, most = loads.index(min(loads)), loads.index(max(loads))
        gap = loads[most] - loads[least]
        movable = [
            (abs(gap - 2 * size), rank, block)
            for rank, blocks in enumerate(sizes)
            for block, size in enumerate(blocks)
            if owners[rank][block] == most and 0 < size < gap
        ]
        if not movable:
            return tuple(map(tuple, owners))
        _, rank, block = min(movable)
        owners[rank][block] = least
        loads[most] -= sizes[rank][block]
        loads[least] += sizes[rank][block]


def micro_batches(blocks: Sequence[Block], *, max_tokens: int, padded: bool = False) -> list[PackedBatch]:
    """The blocks as micro-batches of at most so many tokens, as few as fit and near equal.

    Args:
        padded: the model pads the rows of a micro-batch to the longest, and the padding counts.
    """
    lengths = [block_tokens(block) for block in blocks]
    packed = pack_padded(lengths, max_tokens) if padded else pack(lengths, max_tokens)
    return [lay_out([blocks[index] for index in batch]) for batch in packed]


def pack(lengths: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches of row indices: each row in exactly one, none over the budget, no row split.

    As many as first-fit decreasing needs, at most 11/9 of the best possible number plus one. With that number rows of
    like length are put together if they can be; and the largest micro-batch is as small as this way of packing allows,
    which keeps peak memory low. Deterministic; equal lengths go by index.

    Example: lengths [3, 9, 5, 2] under a budget of 10 give ((1,), (0, 2, 3)).
    """
    if lengths and max(lengths) > max_tokens:
        raise _too_long(len(lengths), f"row {lengths.index(max(lengths))}", max(lengths), max_tokens)
    fewest = first_fit(lengths, max_tokens)
    alike = next_fit(lengths, max_tokens)
    bins = _evened(lengths, alike, next_fit) if len(alike) == len(fewest) else _evened(lengths, fewest, first_fit)
    return tuple(tuple(sorted(batch)) for batch in bins)


def pack_padded(lengths: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """As ``pack`` for rows that are padded: a micro-batch holds the longest of its rows times their number.

    Example: lengths [9, 2, 2, 2, 2, 2] under a budget of 10 give ((0,), (1, 2, 3, 4, 5)).
    """
    bins: list[list[int]] = []
    for row in _longest_first(lengths):
        if not bins or lengths[bins[-1][0]] * (len(bins[-1]) + 1) > max_tokens:
            bins.append([])
        bins[-1].append(row)
    return tuple(tuple(sorted(batch)) for batch in bins)


def first_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Bins of row indices: the longest row first, each into the first bin with room for it."""
    rooms: list[int] = []
    bins: list[list[int]] = []
    for row in _longest_first(lengths):
        fitting = next((index for index, left in enumerate(rooms) if left >= lengths[row]), None)
        if fitting is None:
            rooms.append(room - lengths[row])
            bins.append([row])
        else:
            rooms[fitting] -= lengths[row]
            bins[fitting].append(row)
    return bins


def next_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Bins of row indices: the longest row first, each into the last bin if it has room, so that like lie together."""
    left = 0
    bins: list[list[int]] = []
    for row in _longest_first(lengths):
        if not bins or left < lengths[row]:
            bins.append([])
            left = room
        left -= lengths[row]
        bins[-1].append(row)
    return bins


def _evened(
    lengths: Sequence[int], bins: list[list[int]], fit: Callable[[Sequence[int], int], list[list[int]]]
) -> list[list[int]]:
    """As many bins with less room in each: the least that bisection finds to be enough."""
    if not bins:
        return bins
    low = max(max(lengths), -(-sum(lengths) // len(bins))) - 1  # below: not known to be enough
    high = max(sum(lengths[row] for row in group) for group in bins)
    while high - low > 1:
        middle = (low + high) // 2
        tried = fit(lengths, middle)
        if len(tried) <= len(bins):
            bins, high = tried, middle
        else:
            low = middle
    return bins


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def _too_long(rows: int, where: str, length: int, max_tokens: int) -> LearnerError:
    return LearnerError(
        f"packing {rows} rows: {where} has {length} tokens and a micro-batch may hold {max_tokens}. Rows are never "
        f"split: set learner.tokens_per_micro_batch to at least {length}, or let contexts and replies be shorter."
    )


def lay_out(blocks: Sequence[Block]) -> PackedBatch:
    """The blocks one after another as one micro-batch; the columns of trained tokens by block, then by row.

    Example: a block of the rows [5 6 7*] and [5 6 8*], trained where starred, and a block of the row [8 9*] give

        token_ids    5 6 7 8 8 9
        position_ids 0 1 2 2 0 1
        source       1 1 4          6 predicts 7 in the first row and 8 in the second, 8 predicts 9
        target       7 8 9
    """
    segments = [segment for block in blocks for segment in block]
    _check(segments)
    trees = [tree([segment.token_ids for segment in block]) for block in blocks]
    source, target, start = list[int](), list[int](), 0
    for block, laid in zip(blocks, trees, strict=True):
        for segment, indices in zip(block, laid.indices, strict=True):
            for position in (position for turn in segment.turns for position in turn.positions):
                source.append(start + indices[position - 1])
                target.append(segment.token_ids[position])
        start += len(laid.token_ids)
    turns = [turn for segment in segments for turn in segment.turns]
    sizes = [len(turn.logprobs) for turn in turns]
    logprobs_T = torch.tensor([logprob for turn in turns for logprob in turn.logprobs], dtype=torch.float32)
    kl_weights = [turn.weight if turn.kl_weight is None else turn.kl_weight for turn in turns]
    token_ids: Iterable[Sequence[int]] = (laid.token_ids for laid in trees)
    pictures: tuple[str, ...] = ()
    if any(segment.media for segment in segments):
        numbers, pictures = numbered(chain.from_iterable(token_ids))
        token_ids = [numbers]
    return PackedBatch(
        token_ids=_packed(token_ids),
        position_ids=_packed(laid.positions for laid in trees),
        source=torch.tensor(source, dtype=torch.int64),
        target=torch.tensor(target, dtype=torch.int64),
        turns=torch.tensor([number for number, size in enumerate(sizes) for _ in range(size)], dtype=torch.int64),
        logprobs=logprobs_T,
        old=logprobs_T,
        reference=logprobs_T,
        advantages=_repeated([turn.advantage for turn in turns], sizes),
        weights=_repeated([turn.weight for turn in turns], sizes),
        kl_weights=_repeated(kl_weights, sizes),
        pictures=pictures,
    )


def dummy() -> PackedBatch:
    """A micro-batch that changes nothing: two tokens, the second trained with advantage 0 and weight 0.

    For ranks with fewer micro-batches than the others: forward and backward run through every parameter and add a
    gradient of exactly zero, so that collective operations of the ranks stay in step.
    """
    return lay_out([(reply_row((0,), (0,), weight=0.0),)])


def _check(segments: Sequence[Segment]) -> None:
    if not segments:
        raise ValueError("a micro-batch needs at least one row; a rank without rows takes dummy()")
    for number, segment in enumerate(segments):
        if segment.turns and segment.turns[0].start == 0:
            raise LearnerError(
                f"packing row {number} (trajectory {segment.trajectory!r}, from turn {segment.first_turn}): its first "
                f"token is to be trained and has no context, wanted at least one token of prompt before it."
            )
        if segment.media and min(segment.token_ids) >= 0:
            raise LearnerError(
                f"packing row {number} (trajectory {segment.trajectory!r}, from turn {segment.first_turn}): it shows "
                f"pictures, and the model that trains is no model that sees. Set model.path to one that does."
            )


def _repeated(values: Sequence[float], sizes: Sequence[int]) -> Tensor:
    """The value of each turn for each of its tokens, (T,)."""
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))


def _packed(parts: Iterable[Sequence[int]]) -> Tensor:
    return torch.tensor([[value for part in parts for value in part]], dtype=torch.int64)
