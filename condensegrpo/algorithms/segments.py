"""Segments: a trajectory as rows of training data. Pure; no tensors, no text, no pixels, no tokenizer.

Token ids go in as the sampler received and returned them and come out byte-identical: nothing here decodes or encodes.

All embeddings of pictures go to tokens of one id, the model's placeholder. So that rows can be compared, each of these
tokens gets a **name**, a negative number of the picture's hash and the token's index in it. Two tokens have one name if
and only if they show the same part of the same picture; rows that share names and ids share their prefix.

    token_ids   7 8 8 8 9 8 8 8     8 is the placeholder, the pictures are a and b
    named       7 a₀ a₁ a₂ 9 b₀ b₁ b₂
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from condensegrpo.core.errors import LearnerError, PrefixBroken, RolloutError
from condensegrpo.core.trajectory import Segment, StopReason, TrainedTurn, Trajectory, Turn

INDEX_BITS = 20  # of a token's index in its picture
LOGPROB_SLACK = 1e-4  # nats; a log-probability rounded in low precision may lie this far above 0


def segments(
    trajectory: Trajectory,
    *,
    advantage_K: Sequence[float],
    weight_K: Sequence[float],
    kl_weight_K: Sequence[float] | None = None,
) -> tuple[Segment, ...]:
    """The rows that train a trajectory: maximal runs of turns in which each prompt continues the last prompt + output.

    Example: three turns, the prompt of the third rewritten by a condenser; capitals were sampled.

        turn 0   a b           → C
        turn 1   a b C d       → E F        continues: d answers C
        turn 2   x y           → G          declared condensation

        row 0    a b C d E F     trained at C (advantage_K[0]) and at E F (advantage_K[1])
        row 1    x y G           trained at G (advantage_K[2])

    Turns merge wherever the prompt does continue, also where a condensation was declared. Condense turns are turns like
    any other. Each sampled token is trained exactly once, no context token ever. A turn that sampled nothing is context
    to its row; a row in which nothing was sampled would train nothing and is left out.

    Args:
        advantage_K: one advantage a turn; entries beyond the last turn are ignored, so a row of advantage_NK will do.
        weight_K: the weight of each token of a turn in the optimiser step's loss; likewise.
        kl_weight_K: that of its KL term; None: ``weight_K``.
    """
    turns = trajectory.turns
    if len(advantage_K) < len(turns) or len(weight_K) < len(turns):
        raise ValueError(
            f"trajectory {trajectory.id!r} has {len(turns)} turns and needs an advantage and a weight for each, found "
            f"{len(advantage_K)} advantages and {len(weight_K)} weights"
        )
    if any(turn.is_text for turn in turns):
        raise RolloutError(
            f"making the rows of trajectory {trajectory.id!r}: it has replies without log-probabilities, which are "
            f"text and not the sampled tokens, and cannot be trained. Return that of every token from sample()."
        )
    bad = [weight for weight in weight_K[: len(turns)] if not 0 <= weight < math.inf]
    if bad:
        raise ValueError(
            f"trajectory {trajectory.id!r} has a turn whose tokens weigh {bad[0]}, wanted a finite number that is not "
            f"negative: the sign of a token's loss is its advantage's"
        )
    kl_weights: Sequence[float | None] = [None] * len(turns) if kl_weight_K is None else kl_weight_K
    rows = []
    for first, end in pairwise([*_starts(turns), len(turns)]):
        trained = tuple(
            TrainedTurn(
                turn=index,
                start=len(turns[index].prompt_ids),
                logprobs=turns[index].logprobs,
                advantage=float(advantage_K[index]),
                weight=float(weight_K[index]),
                kl_weight=kl_weights[index],
            )
            for index in range(first, end)
            if turns[index].output_ids
        )
        if trained:
            last = turns[end - 1]
            token_ids = (*last.prompt_ids, *last.output_ids)
            rows.append(
                Segment(
                    token_ids=token_ids, turns=trained, trajectory=trajectory.id, first_turn=first, media=last.media
                )
            )
    return tuple(rows)


def reply_row(
    prompt_ids: tuple[int, ...],
    reply_ids: tuple[int, ...],
    *,
    weight: float,
    logprobs: Sequence[float] = (),
    media: tuple[str, ...] = (),
) -> Segment:
    """The row that trains a single reply, every token with the same weight.

    Args:
        logprobs: of the reply under the distribution sampled from; (): the reply was not sampled.
        media: the hashes of the pictures in the prompt, in order.
    """
    logps = tuple(logprobs) or (0.0,) * len(reply_ids)
    turn = TrainedTurn(turn=0, start=len(prompt_ids), logprobs=logps, advantage=0.0, weight=weight)
    return Segment(token_ids=prompt_ids + reply_ids, turns=(turn,), trajectory="", first_turn=0, media=media)


def broken_invariants(trajectory: Trajectory) -> tuple[str, ...]:
    """The invariants that a trajectory breaks, in words; empty if it breaks none. Raises nothing.

    Prompts continue or declare a condensation; a condensation accounts once, in order, for every earlier reply, and
    knows the length of its prompt; log-probabilities are finite and not above 0; its stop gives an answer iff there is
    one.
    """
    found = []
    for index, (last, turn) in enumerate(pairwise(trajectory.turns), start=1):
        position = _first_difference(last, turn)
        if position is not None and turn.condensation is None:
            found.append(str(_prefix_broken(index, last, turn, position)))
    units: list[int] = []  # the replies so far that a condenser had before it
    for index, turn in enumerate(trajectory.turns):
        found += [
            f"turn {index}: the log-probability of output token {number} is {logprob}, wanted a finite number "
            f"of at most 0"
            for number, logprob in enumerate(turn.logprobs)
            if not math.isfinite(logprob) or logprob > LOGPROB_SLACK
        ]
        found += _broken_condensation(index, turn, units)
        if turn.kind == "act":
            units.append(index)
    if trajectory.stop.gives_answer != (trajectory.answer is not None):
        found.append(
            f"the trajectory stopped as {trajectory.stop.value!r} with the answer {trajectory.answer!r}, wanted an "
            f"answer if and only if it stopped as {StopReason.ANSWERED.value!r} or {StopReason.CONFIDENT.value!r}"
        )
    return tuple(found)


def _starts(turns: Sequence[Turn]) -> Iterator[int]:
    """The turns that open a row."""
    for index, turn in enumerate(turns):
        if index == 0:
            yield index
            continue
        position = _first_difference(turns[index - 1], turn)
        if position is None:
            continue
        if turn.condensation is None:
            raise _prefix_broken(index, turns[index - 1], turn, position)
        yield index


def _first_difference(last: Turn, turn: Turn) -> int | None:
    """Where the prompt first differs from the last prompt + output, or ends too early; None: it continues."""
    if turn.added_ids(last) is not None:
        return None
    pairs = zip((*last.prompt_ids, *last.output_ids), turn.prompt_ids, strict=False)
    return next((index for index, (old, new) in enumerate(pairs) if old != new), len(turn.prompt_ids))


def _prefix_broken(index: int, last: Turn, turn: Turn, position: int) -> PrefixBroken:
    if turn.media[: len(last.media)] != last.media:
        return PrefixBroken(
            f"turn {index} does not continue turn {index - 1}: its prompt shows the media {list(turn.media)}, the "
            f"earlier turn showed {list(last.media)}, and no condensation was declared there. Declare the rewrite in "
            f"Turn.condensation."
        )
    token = turn.prompt_ids[position] if position < len(turn.prompt_ids) else None
    expected = (*last.prompt_ids, *last.output_ids)[position]
    return PrefixBroken.at(turn=index, position=position, expected=expected, found=token)


def _broken_condensation(index: int, turn: Turn, units: Sequence[int]) -> Iterator[str]:
    if turn.condensation is None:
        return
    spans = [(span.first, span.last, span.units) for span in turn.condensation.spans]
    ends = list(accumulate((span.units for span in turn.condensation.spans), initial=0))
    expected = [(*units[start:end][:1], *units[start:end][-1:], end - start) for start, end in pairwise(ends)]
    if ends[-1] != len(units) or spans != expected:
        yield (
            f"turn {index}: the condensation by {turn.condensation.condenser!r} accounts for the units {spans} (first "
            f"turn, last turn, how many), wanted every earlier one once and in order: {list(units)}"
        )
    if turn.condensation.tokens_after != len(turn.prompt_ids):
        yield (
            f"turn {index}: the condensation by {turn.condensation.condenser!r} claims "
            f"{turn.condensation.tokens_after} tokens after it, the prompt has {len(turn.prompt_ids)}"
        )


class NamedPicture(NamedTuple):
    """A picture as it stands in rows."""

    token_ids: tuple[int, ...]  # as its family's processor writes it
    named: tuple[int, ...]  # the same, with names for placeholders


def named_picture(sha256: str, token_ids: tuple[int, ...], *, placeholder_id: int) -> NamedPicture:
    """The tokens of a picture; tiles may have other tokens between the placeholders."""
    first, count, named = int(sha256, 16) << INDEX_BITS, 0, list[int]()
    for token in token_ids:
        named.append(~(first | count) if token == placeholder_id else token)
        count += token == placeholder_id
    return NamedPicture(token_ids, tuple(named))


def with_names(row: Segment, picture_of: Callable[[str], NamedPicture]) -> Segment:
    """The row with names for the tokens of its pictures. Placeholders that the policy sampled keep their id."""
    token_ids, start = list(row.token_ids), 0
    context_ends = _context_ends(row)
    for sha256 in row.media:
        picture = picture_of(sha256)
        first, size = picture.token_ids[0], len(picture.token_ids)
        for found in range(start, len(row.token_ids) - size + 1):
            may_begin = row.token_ids[found] == first and found + size <= context_ends[found]
            if may_begin and row.token_ids[found : found + size] == picture.token_ids:
                break
        else:
            raise LearnerError(
                f"packing the row of trajectory {row.trajectory!r} from turn {row.first_turn} on: its prompt does not "
                f"hold the {size} tokens of the picture {sha256[:12]}. Sample and train with the "
                f"same image processor (preprocessor_config.json)."
            )
        start = found + size
        token_ids[found:start] = picture.named
    return replace(row, token_ids=tuple(token_ids))


def numbered(tokens: Iterable[int]) -> tuple[list[int], tuple[str, ...]]:
    """Named tokens as numbers of 64 bits, and the pictures in them: the token i of picture p becomes ~(p·2²⁰ + i)."""
    numbers: dict[int, int] = {}
    result = []
    for token in tokens:
        if token < 0:
            picture, index = divmod(~token, 1 << INDEX_BITS)
            token = ~(numbers.setdefault(picture, len(numbers)) << INDEX_BITS | index)
        result.append(token)
    return result, tuple(f"{picture:064x}" for picture in numbers)


def _context_ends(row: Segment) -> list[int]:
    """For each token the end of the run of context that it stands in; 0: it was sampled."""
    ends, end = [0] * len(row.token_ids), len(row.token_ids)
    for turn in reversed(row.turns):
        ends[turn.positions.stop : end] = [end] * (end - turn.positions.stop)
        end = turn.start
    ends[:end] = [end] * end
    return ends
