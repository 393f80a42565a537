"""The prompt of a conversation put together from pieces, each of which is rendered once.

A conversation is cut before every reply, at the last control token before it:

    <|im_start|>user⏎count<|im_end|>⏎   <|im_start|>assistant⏎hello<|im_end|>⏎<|im_start|>user⏎seen 1<|im_end|>⏎   …

What a template writes for a reply and its results depends on their neighbours: Qwen3 drops the thinking of a reply when
a user message follows anywhere, Mistral writes the tools before the last user message. Templates tell other messages
apart by role, by place, and by testing their content for the tags that stand in the template as quoted strings. So a
message has a *kind*: its role, whether it is empty, and how it contains each of those strings. A piece is good wherever
its neighbours are of the same kinds: the message before it, the reply after it, and all later ones. It is rendered in
a small conversation with these neighbours, of messages of the actual one.

That is a guess about a program. So every new combination of kinds is checked before it is used: the piece must not
change with the words of its neighbours, and the prompt must equal its whole rendering. So must the prompts of the
first conversations of 2, 4, 8, … units. If one differs, prompts are rendered whole from then on, with a warning.
"""

import re
import warnings
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice

from condensegrpo.core.errors import RolloutError
from condensegrpo.core.messages import Message
from condensegrpo.episodes.chat_template import ChatTemplate
from condensegrpo.episodes.encoding import TextEncoder
from condensegrpo.episodes.exchanges import (
    NO_MESSAGE,
    NOTHING,
    Exchange,
    Exchanges,
    Frame,
    Neighbours,
    Piece,
    Shape,
    neighbours_of,
    small_conversation,
)

PROBE = 'It\'s "1" of\t{2}\n\n\\n <b>&amp; naïve 漢字 🙂  ' + 500 * "A b " + "end"  # to be escaped, cut or replaced

PRIVATE = re.compile("[\ue000-\uf8ff]")  # markers and stand-ins
COMPARES = re.compile(r"[!=]= *\w+\[-?\d+\](?! *[.\[])|\w\[-?\d+\] *[!=]=")  # message == user_messages[-1]
LATEST = 4  # conversations whose pieces are kept together
STAND_IN = Message(role="assistant", content="stand-in")


class Uncuttable(Exception):
    """The rendering of a conversation has no places to cut at."""


class Cutter:
    """Renders small conversations of one template, whose exchanges are listed from the newest backwards.

    A content is opaque if it has nothing that the template tests for and no white space around it. Around opaque
    contents the template writes the same frame every time, which is rendered once with stand-ins:

        <|im_start|>assistant⏎ … <|im_end|>⏎<|im_start|>user⏎ … <|im_end|>⏎<|im_start|>assistant⏎

    That is used if the template lets the contents of ``PROBE`` through unchanged.
    """

    def __init__(self, template: ChatTemplate, encoder: TextEncoder, exchanges: Exchanges) -> None:
        self._template = template
        self._encoder = encoder
        self._exchanges = exchanges
        self._transparent: dict[Shape, bool] = {}  # whether the probe came through

    def cut(self, exchanges: Sequence[tuple[Message, ...]]) -> list[Piece] | None:
        """The pieces of a conversation; None: the template refuses it, or does not show a reply."""
        messages = [message for exchange in reversed(exchanges) for message in exchange]
        marker, end = islice(self._template.unused(messages), 2)
        try:
            text = self._template.render(messages, marker, end=end)
            silent = not all(exchange[0].text.strip() for exchange in exchanges[:-1])
            if silent and text.replace(end, "") != self._template.render(messages, marker):
                return None  # the mark alone is shown as a reply, no text is not
        except RolloutError:  # of the whole conversation it is an error
            return None
        ends = [match.start() for match in re.finditer(end, text)]
        if len(ends) < len(exchanges) - 1:
            return None
        controls, starts = self._encoder.controls(text), [0]
        for previous_end, reply_end in zip((-1, *ends), ends, strict=False):
            before = bisect_left(controls, reply_end) - 1
            if before < 0 or controls[before] <= previous_end or len(ends) >= len(exchanges):
                raise Uncuttable("the chat template repeats a reply, or has no special token before it")
            starts.append(controls[before])
        pieces = [
            Piece(frame=Frame((text[start:stop].replace(end, ""),), marker), end=reply_end - start)
            for start, stop, reply_end in zip(starts, (*starts[1:], len(text)), (0, *ends), strict=True)
        ]
        return pieces[::-1]

    def filled(self, conversation: Sequence[Exchange], index: int, neighbours: Neighbours) -> Piece | None:
        """The piece of the exchange at an index, from a frame; None: it has to be rendered."""
        exchange = conversation[index]
        if exchange.opening is None or not all(map(self._opaque, exchange.messages, exchange.kinds)):
            return None
        key = (
            (exchange.kinds, neighbours),
            tuple((message.name, message.tool_call_id) for message in exchange.messages),
        )
        if key not in exchange.opening.frames:
            exchange.opening.frames[key] = self._frame(conversation, index, key[0])
        frame = exchange.opening.frames[key]
        return Piece(frame=frame, messages=exchange.messages) if frame else None

    def _frame(self, conversation: Sequence[Exchange], index: int, shape: Shape) -> Frame | None:
        exchange = conversation[index]
        messages = [message for other in conversation for message in other.messages]
        stand_ins = list(islice(self._template.unused(messages), len(exchange.messages)))
        blank = self._with_contents(conversation, index, stand_ins)
        if blank is None or re.findall("|".join(stand_ins), blank.text) != stand_ins:
            return None
        frame = Frame(tuple(re.split("|".join(stand_ins), blank.text)), blank.frame.marker)
        if shape not in self._transparent:
            probed = tuple(replace(message, content=PROBE) for message in exchange.messages)
            probe = self._with_contents(conversation, index, [PROBE] * len(probed))
            self._transparent[shape] = probe is not None and probe.plain() == Piece(frame, probed).plain()
        return frame if self._transparent[shape] else None

    def _with_contents(self, conversation: Sequence[Exchange], index: int, contents: Sequence[str]) -> Piece | None:
        """The piece of an exchange with other contents."""
        messages = [exchange.messages for exchange in conversation]
        messages[index] = tuple(
            replace(message, content=content, tool_calls=())
            for message, content in zip(conversation[index].messages, contents, strict=True)
        )
        try:
            pieces = self.cut(messages)
        except Uncuttable:
            return None
        return pieces[index] if pieces else None

    def _opaque(self, message: Message, kind: int) -> bool:
        content = message.text
        return (
            kind in self._exchanges.plain
            and content == content.strip()
            and (content.isascii() or not PRIVATE.search(content))
            and self._encoder.escape(content, "?") == content
        )


class Pieces:
    """The pieces of the conversations of one renderer. Exchanges are listed from the newest backwards."""

    def __init__(self, template: ChatTemplate, encoder: TextEncoder) -> None:
        self._template = template
        self._encoder = encoder
        self._compares = COMPARES.search(template.source) is not None
        self._exchanges = Exchanges(template)
        self._cutter = Cutter(template, encoder, self._exchanges)
        self._checked: set[Shape] = set()
        self._ordinary: set[Shape] = set()  # after such a reply the template goes on as after any other
        self._longest = 2  # exchanges of the next conversation that is checked in any case
        self._whole = False  # a check failed
        self._latest = deque[tuple[tuple[Message, ...], list[Piece]]](maxlen=LATEST)

    def keep(self, characters: int) -> None:
        """Keep the pieces of messages of at least so many characters."""
        self._exchanges.kept = max(self._exchanges.kept, characters)

    def of(self, messages: tuple[Message, ...]) -> list[Piece] | None:
        """The pieces of a prompt in order; None: it has to be rendered whole."""
        for latest, pieces in self._latest.copy():  # a prompt is counted, perhaps twice, then rendered
            if len(latest) == len(messages) and latest == messages:
                return pieces
        if not messages or self._is_whole(messages):
            return None
        put_together = self._put_together(messages)
        if put_together is not None:
            self._latest.append((messages, put_together))
        return put_together

    def newest(self, context: Sequence[Message], reply: Message, results: Sequence[Message]) -> Piece | None:
        """A piece whose text after ``reply_end`` follows a reply in this place; None: it has to be rendered whole."""
        if self._is_whole(chain(context, results)):
            return None
        earlier = list(islice(self._exchanges.backwards(context), 4))
        if earlier[-1].opening and len(earlier) == 4 and not earlier[-1].shown:
            self._exchanges.drop(earlier.pop())  # a prompt that goes on by ids needs the newest alone
        opening = earlier[0].opening or earlier[0]
        exchanges = [self._exchanges.exchange(opening, (reply, *results)), *earlier]
        piece, shape = None, (exchanges[0].kinds, neighbours_of(exchanges, 0))
        if reply.text == reply.text.rstrip():
            if earlier[0].opening:
                self._piece(exchanges, 1)  # asked for next, and rendered together with this one
            piece = self._piece_or_check(exchanges, 0, chain(context, exchanges[0].messages))
            if shape in self._ordinary:
                return piece
        exchanges[0] = self._exchanges.exchange(opening, (STAND_IN, *results))
        usual = self._piece_or_check(exchanges, 0, chain(context, exchanges[0].messages))
        if piece and usual and piece.text[piece.reply_end :] == usual.text[usual.reply_end :]:
            self._ordinary.add(shape)
        return usual

    def keep_replies(self, messages: Sequence[Message]) -> bool | None:
        """Whether the pieces before the last reply stay as they were before it, and it is shown as it was said.

        Only those are compared whose neighbours the last reply and its results change. True where there is no reply;
        None: whole renderings have to be compared.
        """
        if self._is_whole(messages):
            return None
        walk = self._exchanges.backwards(messages)
        exchanges, later = list(islice(walk, 3)), NO_MESSAGE
        newest = exchanges[0]
        for index in range(1, len(messages) + 1 if newest.opening else 0):
            exchange = exchanges[index]
            earlier = self._piece_or_check(
                exchanges[1:], index - 1, islice(messages, len(messages) - len(newest.messages))
            )
            later_piece = self._piece_or_check(exchanges, index, messages)
            added = self._piece_or_check(exchanges, 0, messages)
            if earlier is None or later_piece is None or added is None:
                return None
            text = later_piece.plain() + (added.plain(added.reply_end) if index == 1 else "")
            reply = newest.messages[0].text if index == 1 else ""
            if not text.startswith(earlier.plain()) or text[len(earlier.plain()) :].strip() != reply.strip():
                return False
            later |= exchange.all_kinds
            if exchange.opening is None or not newest.all_kinds & ~later:
                break
            exchanges.extend(islice(walk, 1))
        return True

    def _is_whole(self, messages: Iterable[Message]) -> bool:
        """Whether a conversation is rendered whole: its template compares messages, and some are equal."""
        if self._whole or not self._compares:
            return self._whole
        answers = [message for message in messages if message.role != "assistant"]
        return len(set(answers)) < len(answers)

    def _piece_or_check(
        self, exchanges: Sequence[Exchange], index: int, conversation: Iterable[Message]
    ) -> Piece | None:
        """The piece of an exchange; if it is not checked yet, the conversation is."""
        piece = self._piece(exchanges, index)
        return self._piece(exchanges, index) if piece is None and self.of(tuple(conversation)) else piece

    def _piece(self, exchanges: Sequence[Exchange], index: int) -> Piece | None:
        """The piece of an exchange that is checked or of a checked shape."""
        exchange, neighbours = exchanges[index], neighbours_of(exchanges, index)
        piece = exchange.pieces.get(neighbours)
        return (
            self._rendered(exchanges, index)
            if piece is None and (exchange.kinds, neighbours) in self._checked
            else piece
        )

    def _put_together(self, messages: tuple[Message, ...], *, again: bool = False) -> list[Piece] | None:
        exchanges = list(self._exchanges.backwards(messages))
        pieces, following, later = list[Piece | None](), NO_MESSAGE, NO_MESSAGE
        for exchange, before in zip(exchanges, (*exchanges[1:], NOTHING), strict=True):
            pieces.append(exchange.pieces.get(Neighbours(before.last_kind, following, later)))
            following, later = exchange.first_kind, later | exchange.all_kinds
        unchecked = dict[int, Neighbours]()
        missing = [index for index, piece in enumerate(pieces) if piece is None] if None in pieces else []
        for index in reversed(missing):
            neighbours = neighbours_of(exchanges, index)
            pieces[index] = exchanges[index].pieces.get(neighbours) or self._rendered(exchanges, index)
            if pieces[index] is None:
                return None
            if neighbours not in exchanges[index].pieces:
                unchecked[index] = neighbours
        prompt = [piece for piece in reversed(pieces) if piece]
        if not unchecked and len(exchanges) < self._longest:
            return prompt
        if self._equals_whole_rendering(messages, prompt) and all(
            self._ignores_wording(exchanges, index) for index in unchecked
        ):
            for index, neighbours in unchecked.items():
                self._checked.add((exchanges[index].kinds, neighbours))
                exchanges[index].pieces[neighbours] = prompt[-1 - index]
            self._longest = max(self._longest, 1 << len(exchanges).bit_length())
            return prompt
        if not again:  # the pieces may be old: some templates write the date
            self._exchanges.forget()
            return self._put_together(messages, again=True)
        self._give_up("put together from its pieces, the prompt is not what the chat template writes for all of it")
        return None

    def _give_up(self, reason: str) -> None:
        self._whole = True
        warnings.warn(
            f"rendering a conversation: {reason}. From now on every prompt is rendered whole: it is right, but a turn "
            f"costs the more the longer the conversation is. Use a chat template that does not number or repeat "
            f"messages and has a special token before every reply.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _equals_whole_rendering(self, messages: Sequence[Message], pieces: Sequence[Piece]) -> bool:
        marker = next(self._template.unused(messages))
        whole = self._encoder.encode_whole(self._template.render(messages, marker), marker)
        return whole == joined(pieces, self._encoder)

    def _ignores_wording(self, exchanges: Sequence[Exchange], index: int) -> bool:
        """Whether a piece does not change with the words of its neighbours."""
        small, small_index = small_conversation(exchanges, index)
        others = [
            exchange.messages
            if index_in_small == small_index or exchange.opening is None
            else tuple(map(self._reworded, exchange.messages))
            for index_in_small, exchange in enumerate(small)
        ]
        pieces, reworded = self._cut([exchange.messages for exchange in small]), self._cut(others)
        return (
            pieces is not None and reworded is not None and pieces[small_index].plain() == reworded[small_index].plain()
        )

    def _reworded(self, message: Message) -> Message:
        """Another message of the same kind, if it is easily made."""
        if message.media:
            return message
        half = len(message.text) // 2
        other = replace(message, content=f"{message.text[:half]}x{message.text[half:]}")
        return other if self._exchanges.kind(other) == self._exchanges.kind(message) else message

    def _rendered(self, exchanges: Sequence[Exchange], index: int) -> Piece | None:
        """The piece of an exchange, from a small conversation whose checked pieces are kept."""
        small, small_index = small_conversation(exchanges, index)
        exchange, neighbours = exchanges[index], neighbours_of(exchanges, index)
        if (exchange.kinds, neighbours) in self._checked:
            filled = self._cutter.filled(small, small_index, neighbours)
            if filled:
                exchange.pieces[neighbours] = filled
                return filled
        pieces = self._cut([exchange.messages for exchange in small])
        if pieces is None:
            return None
        for index_in_small, exchange in enumerate(small):
            neighbours = neighbours_of(small, index_in_small)
            if (exchange.kinds, neighbours) in self._checked:
                exchange.pieces[neighbours] = pieces[index_in_small]
        return pieces[small_index]

    def _cut(self, exchanges: Sequence[tuple[Message, ...]]) -> list[Piece] | None:
        try:
            return self._cutter.cut(exchanges)
        except Uncuttable as error:
            self._give_up(str(error))
            return None


def joined(pieces: Iterable[Piece], encoder: TextEncoder) -> "array[int]":
    """The ids of some pieces in order."""
    ids = array("I", b"".join([piece.known_ids or piece.ids(encoder) for piece in pieces]))
    return ids[:]  # which takes as much memory as it needs, a sixteenth less
