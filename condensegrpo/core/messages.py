"""Messages, units, and the history that they form in an episode. Standard library only."""

import hashlib
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from operator import attrgetter
from typing import Literal, Self, get_args

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)


def encodable(text: str) -> str:
    """The text with ? for every lone surrogate, such as half an emoji in JSON: none can be tokenised, sent or saved."""
    return text.encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model wrote. ``arguments`` stays the raw JSON that it wrote, valid or not."""

    id: str
    name: str
    arguments: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.arguments, str):
            raise TypeError(
                f"a ToolCall has a name and its arguments as JSON text, found {self.name!r:.80} and "
                f"{self.arguments!r:.80}; for a dict: json.dumps"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A part of a message that is text."""

    text: str  # see ``encodable``

    def __post_init__(self) -> None:
        if not self.text.isascii():
            object.__setattr__(self, "text", encodable(self.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """A part of a message that is a picture, named by its content: two files are one if and only if their bytes are."""

    sha256: str  # of the file's bytes, in hexadecimal
    type: str  # such as image/png
    # the bytes; None: they are in a ``MediaStore``, where the engine puts those of every message that it takes up
    data: bytes | None = field(default=None, compare=False, repr=False, metadata={"stored": False})

    @classmethod
    def of(cls, data: bytes, kind: str) -> Self:
        """The part that shows a picture, from the bytes of its file and its type, such as ``image/png``."""
        return cls(sha256=hashlib.sha256(data).hexdigest(), type=kind, data=data)

    @property
    def text(self) -> str:
        """The text that stands for it."""
        return f"[{self.type} {self.sha256[:12]}]"


Part = TextPart | MediaPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The token ids of a sampled reply, and the text and reasoning that they say."""

    ids: tuple[int, ...]  # without the stop id
    vocabulary: int  # names the tokenizer
    text: str
    reasoning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message: text, or parts of text and media. Reasoning and calls of a reply are parsed from its ids."""

    role: Role
    content: str | tuple[Part, ...]  # without the reasoning; a text is the same as one part of it; see ``encodable``
    reasoning: str = ""  # of a reply: what it thought, which neither answers nor calls
    tool_calls: tuple[ToolCall, ...] = ()  # of a reply; in some tool formats the content holds their text, too
    tool_call_id: str | None = None  # of a tool result: the call that it answers
    name: str | None = None  # of a tool result: the tool
    # of a sampled reply, see ``ids_in``
    written: Written | None = field(default=None, compare=False, repr=False, metadata={"stored": False})

    def __post_init__(self) -> None:
        if isinstance(self.content, tuple) and not self.media:
            object.__setattr__(self, "content", self.text)  # one value for one message
        elif isinstance(self.content, str) and not self.content.isascii():
            object.__setattr__(self, "content", encodable(self.content))

    def ids_in(self, vocabulary: int) -> tuple[int, ...]:
        """The ids that were sampled; none of another vocabulary, and none if it was not sampled, or rewritten since."""
        written = self.written
        if written is None or written.vocabulary != vocabulary:
            return ()
        return written.ids if (written.text, written.reasoning) == (self.content, self.reasoning) else ()

    @property
    def text(self) -> str:
        """The text, in which media are named."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def text_without_media(self) -> str:
        """The text without its media."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def parts(self) -> tuple[Part, ...]:
        """Text and media in order."""
        return (TextPart(text=self.content),) if isinstance(self.content, str) else self.content

    @property
    def media(self) -> tuple[MediaPart, ...]:
        """The media in order."""
        parts = () if isinstance(self.content, str) else self.content
        return tuple(part for part in parts if isinstance(part, MediaPart))

    def followed_by(self, text: str) -> Self:
        """This message with a text after its last part."""
        if isinstance(self.content, str):
            return replace(self, content=f"{self.content}{text}")
        return replace(self, content=(*self.content, TextPart(text=text)))

    def stored(self, store: Callable[[MediaPart], MediaPart]) -> Self:
        """This message after ``store`` took the bytes of its media."""
        if isinstance(self.content, str):
            return self
        return replace(
            self, content=tuple(store(part) if isinstance(part, MediaPart) else part for part in self.content)
        )

    def showing(self, media: Sequence[MediaPart]) -> Self:
        """This message with media after its last part."""
        return replace(self, content=(*self.parts, *media)) if media else self

    def __eq__(self, other: object) -> bool:
        """Compares the text first: messages that differ mostly differ in it."""
        if not isinstance(other, Message):
            return NotImplemented
        return self.content == other.content and (
            (self.role, self.reasoning, self.tool_calls, self.tool_call_id, self.name)
            == (other.role, other.reasoning, other.tool_calls, other.tool_call_id, other.name)
        )

    def __hash__(self) -> int:
        """The hash of the text, which Python remembers: messages are keys of caches."""
        return hash((self.role, self.content))


def checked_messages(value: object, source: str) -> tuple[Message, ...]:
    """The messages that a plug-in made; TypeError if they are none. ``source`` names them: ``start()``."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(
            f"{source} returned {value!r:.80}, wanted a tuple of messages, as in "
            f'return (Message(role="user", content=problem.question),)'
        )
    for message in value:
        if not isinstance(message, Message) or not isinstance(message.content, str | tuple):
            raise TypeError(
                f"{source} returned {message!r:.80} among its messages, wanted a Message whose content is text"
            )
        if message.role not in ROLES:
            raise TypeError(f"{source} returned a message of role {message.role!r}, known roles: {', '.join(ROLES)}")
    return tuple(value)


def one_by_user(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with those of the user in a row as one, line by line; it answers the call of the first of them."""
    joined = list[Message]()
    for message in messages:
        if joined and joined[-1].role == message.role == "user":
            parts = (*joined[-1].parts, TextPart(text="\n"), *message.parts)
            joined[-1] = replace(joined[-1], content=parts)
        else:
            joined.append(message)
    return tuple(joined)


COMPARED_UNITS = 4  # units that a note is taken to be like
MESSAGE_TOKENS = 4  # tokens that the template adds to a message, for estimates
LEAST_DENSITY = 1 / 3  # tokens of a character of inserted text, at least: such text is full of numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One assistant reply with everything that answered it: condensers keep, drop or rewrite whole units.

    The tokens of units add up: what they are together is what they take of a prompt, template included.
    """

    turn: int  # index of the turn that sampled the reply; stays with the unit when others are dropped
    reply: Message
    results: tuple[Message, ...] = ()  # tool results and environment observations, in order
    tokens: int = field(default=0, compare=False)  # counted when the reply was answered; estimated of rewritten units
    media_tokens: int = field(default=0, compare=False)  # of these, those of pictures
    is_note: bool = False  # a text that stands for units up to its turn, see ``note``
    pinned: bool = False  # it ends in a message of the user: shown until the next one, and after it if there is room

    def __hash__(self) -> int:
        """The hash of the turn and of the text that condensers rewrite most, see ``Message``."""
        return hash((self.turn, self.results[-1].text if self.results else self.reply.text))

    @property
    def messages(self) -> tuple[Message, ...]:
        """The reply followed by its results."""
        return (self.reply, *self.results)

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens of a character of its texts, at most 1, and tokens that the template adds to a message."""
        messages, tokens = self.messages, self.tokens - self.media_tokens
        characters = max(sum(len(message.text_without_media) for message in messages), 1)
        density = min(max((tokens - MESSAGE_TOKENS * len(messages)) / characters, 0.0), 1.0)
        return density, max((tokens - density * characters) / len(messages), MESSAGE_TOKENS)

    def tokens_of(self, message: Message) -> int:
        """The tokens of one of its messages without its pictures: a share by characters."""
        density, frame = self.rates
        return round(frame + density * len(message.text_without_media))

    def estimate(self, text: str) -> int:
        """The tokens of a message with an inserted text, if it is like the messages of this unit."""
        density, frame = self.rates
        return ceil(frame + len(text) * max(density, LEAST_DENSITY))

    def with_results(self, results: tuple[Message, ...], *, media_tokens: int | None = None) -> Self:
        """This unit with other results, one for each; its tokens are estimated.

        Args:
            media_tokens: of the pictures of the new results; None: as before.
        """
        media = self.media_tokens if media_tokens is None else media_tokens
        tokens = self.tokens - self.media_tokens + media
        for old, new in zip(self.results, results, strict=True):
            if new is not old:
                tokens += self.estimate(new.text_without_media) - self.tokens_of(old)
        return replace(self, results=results, tokens=max(tokens, 1), media_tokens=media)

    def with_instruction(self, instruction: str) -> Self:
        """This unit with an instruction after its results: appended to a last user message, or as a further one.

        Two user messages in a row are refused by some chat templates.
        """
        tokens = self.tokens + self.estimate(instruction)
        if self.results and self.results[-1].role == "user":
            *before, last = self.results
            return replace(self, results=(*before, last.followed_by(f"\n\n{instruction}")), tokens=tokens)
        return replace(self, results=(*self.results, Message(role="user", content=instruction)), tokens=tokens)


OMITTED = "[turns up to 0 omitted, summarised above: 0 tokens]"  # the words of the message under a note


def note(history: "History", dropped: Sequence[Unit], text: str, *, how: str = "replaced by the note above") -> Unit:
    """The unit that is shown in the place of dropped units: a text as a reply, then a message that says so.

        note(history, history.units[:3], "The code is 47.")
            assistant: The code is 47.
            user: [turns up to 2 omitted, replaced by the note above: 812 tokens]

    To have it in the next call too, as ``history.note``, return it as ``Condensed(note=…)`` as well.

    Args:
        dropped: at least one, in order; an earlier note may be the first.
        how: what the message says of the text.
    """
    last, tokens = dropped[-1].turn, sum(unit.tokens for unit in dropped)
    omitted = f"[turns up to {last} omitted, {how}: {tokens} tokens]"
    return Unit(
        turn=last,
        reply=Message(role="assistant", content=text),
        results=(Message(role="user", content=omitted),),
        tokens=max(unit.estimate(text) + unit.estimate(omitted) for unit in dropped[-COMPARED_UNITS:]),
        is_note=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    """A text of the policy about pictures, written before they were omitted; shown with the last of them."""

    turn: int  # Unit.turn of the unit that shows the last of them
    text: str  # one line; empty: it wrote none that can be used


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """An episode so far: the pinned messages, which no condenser changes, and the raw units after them.

    The last note and the captions are the only output of a condenser that the next call sees. The units that they
    replace stay here unchanged.
    """

    pinned: tuple[Message, ...]  # system message, question, examples
    units: tuple[Unit, ...] = ()
    note: Unit | None = None  # the last one that a condenser returned as ``Condensed.note``
    captions: tuple[Caption, ...] = ()  # of omitted pictures, in the order of their turns
    raw: tuple[Unit, ...] | None = field(default=None, compare=False, repr=False)  # where ``units`` are a view of them
    shown: Sequence[Unit] | None = field(default=None, compare=False, repr=False)  # in the prompt of a calling reply

    def add(self, unit: Unit) -> Self:
        """This history with one more unit at its end."""
        return replace(self, units=(*self.units, unit))

    def with_note(self, note: Unit | None) -> Self:
        """This history with another note, or none."""
        return self if note is self.note else replace(self, note=note)

    def with_captions(self, captions: tuple[Caption, ...]) -> Self:
        """This history with more captions."""
        return replace(self, captions=(*self.captions, *captions)) if captions else self

    def with_units(self, units: tuple[Unit, ...]) -> Self:
        """Other units after the same pinned messages, and no note; ``raw_units`` stay."""
        if (units, self.note) == (self.units, None):
            return self
        return replace(self, units=units, note=None, raw=self.raw_units)

    @property
    def raw_units(self) -> tuple[Unit, ...]:
        """The units of the episode, whatever an earlier stage of a pipeline left of them."""
        return self.units if self.raw is None else self.raw

    @property
    def current_units(self) -> tuple[Unit, ...]:
        """The last note and the units after it; all units if there is no note."""
        if self.note is None:
            return self.units
        return (self.note, *self.units[bisect_right(self.units, self.note.turn, key=_turn) :])

    @property
    def visible_units(self) -> Sequence[Unit]:
        """The units that the policy saw when it replied, and the newest: for tools that a condenser offers."""
        return self.raw_units if self.shown is None else (*self.shown, self.raw_units[-1])

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages in order."""
        return flatten(self.pinned, self.units)


def flatten(pinned: Sequence[Message], units: Sequence[Unit]) -> tuple[Message, ...]:
    """The pinned messages and those of some units, in order."""
    messages = list(pinned)
    for unit in units:
        messages.append(unit.reply)
        messages += unit.results
    return tuple(messages)


_turn = attrgetter("turn")


RECALLED = "[recalled from turn "  # how a result begins that shows an omitted observation once more
_TAGS = re.compile(r"\s*<(result|output)>(.*)</\1>\s*", re.DOTALL)
_METER = re.compile(r"\n\[turn \d+(?:: \d+ of \d+ context tokens used, \d+ left)?\]\Z")


def recalled_turn(message: Message) -> int | None:
    """The turn whose observation a result shows once more; None: of no other turn."""
    found = re.match(re.escape(RECALLED) + r"(\d+)\]", bare(message))
    return int(found[1]) if found else None


def meter_line(turn: int, tokens: tuple[int, int] | None = None) -> str:
    """The line that a meter appends to the observation of a turn; ``tokens``: used, and in all.

    [turn 5]      [turn 5: 812 of 2048 context tokens used, 1236 left]
    """
    if tokens is None:
        return f"\n[turn {turn}]"
    used, most = tokens
    return f"\n[turn {turn}: {used} of {most} context tokens used, {max(most - used, 0)} left]"


def without_meter(text: str) -> str:
    """The text of an observation without the line of a meter."""
    return _METER.sub("", text) if text.endswith("]") else text


def bare(message: Message) -> str:
    """The text of a tool result without media, the tags of a built-in tool format and the line of a meter."""
    text = without_meter(message.text_without_media)
    tagged = _TAGS.fullmatch(text)
    return tagged[2] if tagged else text


def is_error(message: Message) -> bool:
    """Whether a tool result is an error text, also after the few words that a tool format of others may begin with."""
    return "Error:" in bare(message)[:60]
