"""A conversation in exchanges: its opening, and every reply with its results. What a template can tell about them."""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import or_
from threading import RLock
from typing import NamedTuple

from condensegrpo.core.messages import Message
from condensegrpo.episodes.chat_template import ChatTemplate
from condensegrpo.episodes.encoding import TextEncoder

KEPT = 2**24  # characters of messages whose pieces are kept, unless there is more in use
QUOTED = re.compile(r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"")
SIGN = re.compile(r"[^\w\s.,-]")
# of contents: 'word' in content, content.startswith('{'), content == 'word', content[0] == '{'
TESTED = re.compile(
    rf"(?:startswith|endswith|content['\"]?\]?(?:\[-?\d+\]|[.|] *\w+(?:\(\))?)* *[!=]=) *\(? *({QUOTED.pattern})"
    rf"|({QUOTED.pattern}) (?:not )?in\b"
)

Kind = int  # one bit, the same for messages that a template cannot tell apart; bits are given out as kinds appear
Kinds = int  # a set of kinds: the union of their bits
NO_MESSAGE: Kind = 0


class Neighbours(NamedTuple):
    """What is around an exchange in a conversation, as a template sees it."""

    before: Kind  # of the message before it; NO_MESSAGE: it is an opening
    next_reply: Kind  # of the reply after it; NO_MESSAGE: it is the newest exchange
    later: Kinds  # of all messages after it


@dataclass(frozen=True, slots=True)
class Frame:
    """What the template writes around the contents of some messages; a text that is whole has one part."""

    texts: tuple[str, ...]  # before each content, and after the last
    marker: str  # breaks up the special tokens in the texts that are not the template's


@dataclass(slots=True, eq=False)
class Piece:
    """What the template writes for some messages between some neighbours."""

    frame: Frame
    messages: tuple[Message, ...] = ()  # whose contents fill the frame
    end: int = 0  # of the reply in a text that is whole
    known_ids: "array[int] | None" = None

    @property
    def text(self) -> str:
        """The frame with the contents in it."""
        contents = (*(message.text for message in self.messages), "")
        return "".join(chain.from_iterable(zip(self.frame.texts, contents, strict=True)))

    @property
    def reply_end(self) -> int:
        """Where the reply ends in the text."""
        return len(self.frame.texts[0]) + len(self.messages[0].text) if self.messages else self.end

    def ids(self, encoder: TextEncoder) -> "array[int]":
        """The ids of the text."""
        if self.known_ids is None:
            self.known_ids = encoder.encode(self.text, self.frame.marker)
        return self.known_ids

    def plain(self, end: int | None = None) -> str:
        """The text without markers, up to ``end``."""
        return self.text[:end].replace(self.frame.marker, "")


Shape = tuple[tuple[Kind, ...], Neighbours]  # the messages of an exchange, and what is around them
FrameKey = tuple[Shape, tuple[tuple[str | None, str | None], ...]]  # tool and call of each message


@dataclass(slots=True, eq=False)
class Exchange:
    """A reply with its results, or the opening of a conversation: the messages before its first reply."""

    opening: "Exchange | None"  # of the conversation; None: it is one
    messages: tuple[Message, ...]
    kinds: tuple[Kind, ...]  # of each message
    first_kind: Kind
    last_kind: Kind
    all_kinds: Kinds
    pieces: dict[Neighbours, Piece] = field(default_factory=dict)  # checked ones
    frames: dict[FrameKey, Frame | None] = field(default_factory=dict)  # of an opening: for the exchanges after it
    # of an opening: the exchanges after it, by the identities of their last messages
    followers: "dict[int, Exchange]" = field(default_factory=dict)

    @property
    def shown(self) -> bool:
        """Whether it was in a prompt that was rendered, with other exchanges after it."""
        return any(
            piece.known_ids is not None for neighbours, piece in list(self.pieces.items()) if neighbours.next_reply
        )


NO_FRAMES: dict[FrameKey, Frame | None] = {}  # of all exchanges that are no openings
NO_FOLLOWERS: dict[int, Exchange] = {}
NOTHING = Exchange(
    opening=None, messages=(), kinds=(), first_kind=NO_MESSAGE, last_kind=NO_MESSAGE, all_kinds=NO_MESSAGE
)


class Exchanges:
    """The exchanges of the conversations of one template, each made once. Those of a conversation: newest first."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.tags = _tags(template.source)  # what the template may look for in contents
        self.plain: set[Kind] = set()  # of messages with words and without any of these
        self._kinds: dict[tuple[object, ...], Kind] = {}
        self._exchanges: dict[tuple[Exchange | None, tuple[Message, ...]], Exchange] = {}
        self.kept = KEPT  # characters
        self._characters = 0  # of the messages of all exchanges
        self._lock = RLock()  # condensers of users count in threads

    def __len__(self) -> int:
        """How many exchanges are kept."""
        return len(self._exchanges)

    def backwards(self, messages: Sequence[Message]) -> Iterator[Exchange]:
        """The units of a conversation from the newest to the oldest, then its opening."""
        first = next((index for index, message in enumerate(messages) if message.role == "assistant"), len(messages))
        opening, end = self.exchange(None, tuple(messages[:first])), len(messages)
        followers = opening.followers
        while end > first:
            exchange = followers.get(id(messages[end - 1]))
            start = end - len(exchange.messages) if exchange else -1
            if exchange is None or start < first or messages[start:end] != exchange.messages:
                start = next(index for index in range(end - 1, first - 1, -1) if messages[index].role == "assistant")
                exchange = self.exchange(opening, tuple(messages[start:end]))
            yield exchange
            end = start
        yield opening

    def exchange(self, opening: Exchange | None, messages: tuple[Message, ...]) -> Exchange:
        """A reply with its results after an opening; an opening if that is None."""
        known = self._exchanges.get((opening, messages))
        if known is not None:
            return known
        with self._lock:
            known = self._exchanges.get((opening, messages))  # another thread may have been quicker
            if known is not None:
                return known
            kinds = tuple(map(self.kind, messages))
            exchange = Exchange(
                opening=opening,
                messages=messages,
                kinds=kinds,
                first_kind=kinds[0] if kinds else NO_MESSAGE,
                last_kind=kinds[-1] if kinds else NO_MESSAGE,
                all_kinds=reduce(or_, kinds, NO_MESSAGE),
            )
            if opening:
                exchange.frames, exchange.followers = NO_FRAMES, NO_FOLLOWERS
                opening.followers[id(messages[-1])] = exchange
            self._characters += _size(exchange)
            while self._characters > self.kept and self._exchanges:
                self.drop(next(iter(self._exchanges.values())))  # the oldest
            self._exchanges[opening, messages] = exchange
        return exchange

    def drop(self, exchange: Exchange) -> None:
        """Forget an exchange."""
        with self._lock:
            kept = self._exchanges.pop((exchange.opening, exchange.messages), None)  # it, or one that equals it
            if kept:
                self._characters -= _size(kept)
                if kept.opening and kept.opening.followers.get(id(kept.messages[-1])) is kept:
                    del kept.opening.followers[id(kept.messages[-1])]

    def forget(self) -> None:
        """Forget all exchanges."""
        with self._lock:
            self._exchanges.clear()
            self._characters = 0

    def kind(self, message: Message) -> Kind:
        """The kind of a message: its role, whether it is empty, and how it contains what the template tests for."""
        content = message.text
        contained = tuple(
            (tag, content.startswith(tag), content.strip().startswith(tag), content.endswith(tag), content == tag)
            for tag in self.tags
            if tag in content
        )
        # a template may tell a first picture apart, or a text before it
        shape = tuple(type(part) for part in message.parts) if message.media else None
        special = not content.strip(), self._template.calls_beside(message), shape, *contained
        with self._lock:
            bit = self._kinds.setdefault((message.role, *special), 1 << len(self._kinds))
            if not any(special):
                self.plain.add(bit)
        return bit


def neighbours_of(exchanges: Sequence[Exchange], index: int) -> Neighbours:
    """The neighbours of an exchange. The exchanges are listed from the newest to at least the one before it."""
    return Neighbours(
        before=exchanges[index + 1].last_kind if exchanges[index].opening else NO_MESSAGE,
        next_reply=exchanges[index - 1].first_kind if index else NO_MESSAGE,
        later=reduce(or_, (exchange.all_kinds for exchange in exchanges[:index]), NO_MESSAGE),
    )


def small_conversation(exchanges: Sequence[Exchange], index: int) -> tuple[list[Exchange], int]:
    """A small conversation in which an exchange has the same neighbours, and its index there."""
    exchange = exchanges[index]
    small, later = list[Exchange](), exchanges[index - 1].all_kinds if index else NO_MESSAGE
    for newer in exchanges[: max(index - 1, 0)]:
        if newer.all_kinds & ~later:
            small.append(newer)
            later |= newer.all_kinds
    small += exchanges[max(index - 1, 0) : index + 1]
    small_index = len(small) - 1
    if exchange.opening:
        before = exchanges[index + 1]
        small += [exchange.opening] if before.last_kind == exchange.opening.last_kind else [before, exchange.opening]
    return small, small_index


def _size(exchange: Exchange) -> int:
    return sum(len(message.text) + 100 for message in exchange.messages)


def _tags(source: str) -> tuple[str, ...]:
    """The quoted strings of a template that it tests for, or that have a sign in them: what may be in messages."""
    code = "".join(re.findall(r"\{[{%].*?[%}]\}", source, re.DOTALL))
    texts = {quoted for quoted in _unquoted(QUOTED.findall(code)) if len(quoted) > 2 and SIGN.search(quoted)}
    tested = _unquoted(chain.from_iterable(TESTED.findall(code)))
    return tuple(sorted(texts.union(text for text in tested if text.strip())))


def _unquoted(texts: Iterable[str]) -> Iterator[str]:
    return (text[1:-1].replace("\\n", "\n") for text in texts)
