"""The whole history before a turn, with what its prompt kept, dropped and rewritten in place.

history       pinned  A0 O0  A1 O1  A2 O2
prompt        pinned         A1 [O1 omitted]  A2 O2
pieces        pinned  A0 O0 dropped, A1 kept, O1 rewritten as [O1 omitted], A2 O2 kept
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from typing import NamedTuple

from condensegrpo.core.messages import Message
from condensegrpo.core.shared_sequence import common_prefix
from condensegrpo.core.trajectory import SpanStatus, Trajectory

COMPARED = 4_000_000  # pairs of words that are all compared; beyond them frequent words are not


class PieceStatus(StrEnum):
    """What the prompt of a turn shows of a message."""

    PINNED = "pinned"  # before the first turn
    KEPT = "kept"
    DROPPED = "dropped"
    REWRITTEN = "rewritten"  # another text in its place
    ADDED = "added"  # by the condenser: a placeholder, a summary, an instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPiece:
    """One message of the history, or one that stands in the prompt alone."""

    turn: int | None  # whose reply or observation it is; None: pinned, or added and not written by the policy
    role: str
    name: str | None  # of a tool
    status: PieceStatus
    text: str  # as it was; of what was added, as it is
    rewritten: str | None = None  # as the prompt has it, if that is another text; empty: a summary stands for it


class WordChange(StrEnum):
    """What a part of a text is in a rewriting."""

    SAME = "same"
    REMOVED = "removed"
    INSERTED = "inserted"


def history(trajectory: Trajectory, turn: int, statuses: Mapping[int, SpanStatus]) -> tuple[HistoryPiece, ...]:
    """The pieces of the history before a turn; ``statuses`` are those of its ``ContextView``."""
    pinned, context = trajectory.turns[0].context, trajectory.turns[turn].context
    if tuple(context[: len(pinned)]) != tuple(pinned):  # no condenser changes them: the environment did
        replies = (index for index, message in enumerate(context) if message.role == "assistant")
        pinned = context[: next(replies, len(context))]
    chunks = _chunks(context[len(pinned) :])
    units = {
        number: (each.reply, *each.observations)
        for number, each in enumerate(trajectory.turns[:turn])
        if each.kind == "act"
    }
    written = {
        _without_thinking(each.reply): number
        for number, each in enumerate(trajectory.turns[:turn])
        if each.kind == "condense"
    }
    summarised = bool(chunks) and _without_thinking(chunks[0][0]) in [*written][-1:]
    positions = _positions(units, chunks, statuses, first=int(summarised))
    pieces = [_piece(message, None, PieceStatus.PINNED) for message in pinned]
    done = 0
    for number, messages in units.items():
        position = positions.get(number)
        if position is None and statuses.get(number) is SpanStatus.REWRITTEN:
            pieces += [_piece(message, number, PieceStatus.REWRITTEN, "") for message in messages]
        elif position is None:
            pieces += [_piece(message, number, PieceStatus.DROPPED) for message in messages]
        else:
            pieces += _added(chunks[done:position], written)
            pieces += _unit(number, messages, chunks[position])
            done = position + 1
    return (*pieces, *_added(chunks[done:], written))


def word_changes(before: str, after: str) -> tuple[tuple[WordChange, str], ...]:
    """A text and its rewriting as one: words that are the same, were removed or inserted."""
    old, new = _words(before), _words(after)
    same = common_prefix(old, new)
    ending = common_prefix(old[same:][::-1], new[same:][::-1])
    parts = [
        (WordChange.SAME, old[:same]),
        *_changes(old[same : len(old) - ending], new[same : len(new) - ending]),
        (WordChange.SAME, old[len(old) - ending :]),
    ]
    return tuple((change, "".join(words)) for change, words in parts if words)


class FirstDifference(NamedTuple):
    """The first difference of two trajectories."""

    turn: int
    where: str  # prompt, or reply


def first_difference(first: Trajectory, second: Trajectory) -> FirstDifference | None:
    """The first turn whose prompt or reply differ, by tokens and by texts; None: they are equal."""
    for number, (one, other) in enumerate(zip(first.turns, second.turns, strict=False)):
        if one.prompt_ids != other.prompt_ids or one.context != other.context:
            return FirstDifference(number, "prompt")
        if one.output_ids != other.output_ids or one.reply != other.reply:
            return FirstDifference(number, "reply")
    if len(first.turns) == len(second.turns):
        return None
    return FirstDifference(min(len(first.turns), len(second.turns)), "reply")


def _changes(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[WordChange, Sequence[str]]]:
    """The changes between words that neither begin nor end alike; of very many, frequent words may count as changed."""
    matcher = SequenceMatcher(None, old, new, autojunk=len(old) * len(new) > COMPARED)
    for tag, first, end, start, stop in matcher.get_opcodes():
        if tag == "equal":
            yield WordChange.SAME, old[first:end]
        else:
            yield WordChange.REMOVED, old[first:end]
            yield WordChange.INSERTED, new[start:stop]


def _chunks(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Messages by replies, each with what follows it."""
    chunks: list[list[Message]] = []
    for message in messages:
        if message.role == "assistant" or not chunks:
            chunks.append([])
        chunks[-1].append(message)
    return [tuple(chunk) for chunk in chunks]


def _positions(
    units: Mapping[int, tuple[Message, ...]],
    chunks: Sequence[tuple[Message, ...]],
    statuses: Mapping[int, SpanStatus],
    *,
    first: int,
) -> dict[int, int]:
    """The chunk of each unit whose reply the prompt still has, among those from ``first``.

    From the end, since equal replies may come twice.
    """
    positions: dict[int, int] = {}
    end = len(chunks)
    for number in reversed(list(units)):
        if statuses.get(number, SpanStatus.KEPT) is SpanStatus.DROPPED:
            continue
        reply = units[number][0].text
        same = [position for position in range(first, end) if chunks[position][0].text == reply]
        if same:
            positions[number] = end = same[-1]
    return positions


def _unit(number: int, messages: Sequence[Message], chunk: Sequence[Message]) -> Iterator[HistoryPiece]:
    """The messages of a unit beside those that the prompt has of it."""
    for before, after in zip(messages, chunk, strict=False):
        if before.text == after.text:
            yield _piece(before, number, PieceStatus.KEPT)
        else:
            yield _piece(before, number, PieceStatus.REWRITTEN, after.text)
    yield from (_piece(message, number, PieceStatus.DROPPED) for message in messages[len(chunk) :])
    yield from _added([chunk[len(messages) :]], {})


def _added(chunks: Sequence[Sequence[Message]], written: Mapping[str, int]) -> list[HistoryPiece]:
    """What no unit has; of a summary that the policy wrote, with the turn in which it did."""
    messages = (message for chunk in chunks for message in chunk)
    return [_piece(message, written.get(_without_thinking(message)), PieceStatus.ADDED) for message in messages]


def _without_thinking(message: Message) -> str:
    """As a summary is shown."""
    return message.text.rpartition("</think>")[2].strip()


def _piece(message: Message, turn: int | None, status: PieceStatus, rewritten: str | None = None) -> HistoryPiece:
    return HistoryPiece(
        turn=turn, role=message.role, name=message.name, status=status, text=message.text, rewritten=rewritten
    )


def _words(text: str) -> list[str]:
    """Words, spaces and signs; what stands for a picture is one word."""
    return re.findall(r"\[image/[a-z]+ [0-9a-f]{12}\]|\s+|\w+|[^\w\s]", text)
