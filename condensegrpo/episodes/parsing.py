"""Replies as messages: what was thought, said and called, from the ids that were sampled and the prompt before them."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from condensegrpo.core.messages import Message, ToolCall, Written
from condensegrpo.episodes.toolformats import Malformed

_OPENINGS, _CLOSINGS = ("<think>", "[THINK]"), ("</think>", "[/THINK]")
_TAG = re.compile("|".join(map(re.escape, (*_OPENINGS, *_CLOSINGS))))
_THOUGHT = re.compile(r"(<think>|\[THINK\])(.*?)(</think>|\[/THINK\]|\Z)", re.DOTALL)


class ParsedReply(NamedTuple):
    """A reply that was read."""

    message: Message
    calls: tuple[ToolCall | Malformed, ...] | None = None  # None: the tool format looks for them in the text
    thinking: bool = False  # whether it ends in a thought


def opens_thought(prompt: str) -> bool:
    """Whether what a template writes before a reply opens a thought."""
    opened, closed = (max(map(prompt.rfind, tags)) for tags in (_OPENINGS, _CLOSINGS))
    return opened > closed


def split_thought(text: str, *, opened: bool) -> tuple[str, str, bool]:
    """The text of a reply without its thoughts, the thoughts, and whether it ends in one.

        "<think>2 + 2</think>4"   ─▶  "4", "2 + 2", False          "4 <think>or"   ─▶  "4 ", "or", True

    A closing tag before any opening one ends a thought that the prompt opened.
    """
    if not opened and not any(tag in text for tag in (*_OPENINGS, *_CLOSINGS)):
        return text, "", False
    first = _TAG.search(text)
    if opened or (first is not None and first[0] in _CLOSINGS):
        text = f"<think>{text}"
    found = list(_THOUGHT.finditer(text))
    said = _THOUGHT.sub("", text).strip("\n")
    return said, "\n\n".join(thought for match in found if (thought := match[2].strip())), not found[-1][3]


def read_text(text: str, ids: Sequence[int] = (), vocabulary: int = 0, *, opened: bool = False) -> ParsedReply:
    """The reply of a model whose thoughts stand between tags, and whose calls are text."""
    said, reasoning, thinking = split_thought(text, opened=opened)
    return ParsedReply(sampled_message(said, reasoning, ids, vocabulary), thinking=thinking)


def sampled_message(
    said: str, reasoning: str, ids: Sequence[int], vocabulary: int, calls: Sequence[ToolCall | Malformed] = ()
) -> Message:
    """The message of a sampled reply; ``ids`` are without the stop id."""
    written = Written(ids=tuple(ids), vocabulary=vocabulary, text=said, reasoning=reasoning) if ids else None
    read = tuple(call for call in calls if isinstance(call, ToolCall))
    return Message(role="assistant", content=said, reasoning=reasoning, tool_calls=read, written=written)
