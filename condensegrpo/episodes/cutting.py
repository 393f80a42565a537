"""What a template writes for an exchange of a small conversation: rendered and cut out, or filled into a frame.

A content is opaque if it has nothing that the template tests for and no white space around it. Around opaque contents
the template writes the same frame every time, which is rendered once with stand-ins:

    <|im_start|>assistant⏎ … <|im_end|>⏎<|im_start|>user⏎ … <|im_end|>⏎<|im_start|>assistant⏎

That is used if the template lets the contents of ``PROBE`` through unchanged.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from condensegrpo.core.errors import RolloutError
from condensegrpo.core.messages import Message
from condensegrpo.episodes.chat_template import ChatTemplate
from condensegrpo.episodes.encoding import TextEncoder
from condensegrpo.episodes.exchanges import Exchange, Exchanges, Frame, Neighbours, Piece, Shape

PROBE = 'It\'s "1" of\t{2}\n\n\\n <b>&amp; naïve 漢字 🙂  ' + 500 * "A b " + "end"  # to be escaped, cut or replaced

PRIVATE = re.compile("[\ue000-\uf8ff]")  # markers and stand-ins


class Uncuttable(Exception):
    """The rendering of a conversation has no places to cut at."""


class Cutter:
    """Renders small conversations of one template, whose exchanges are listed from the newest backwards."""

    def __init__(self, template: ChatTemplate, encoder: TextEncoder, exchanges: Exchanges) -> None:
        self._template = template
        self._encoder = encoder
        self._exchanges = exchanges
        self._transparent: dict[Shape, bool] = {}  # whether the probe came through

    def cut(self, exchanges: Sequence[tuple[Message, ...]]) -> list[Piece] | None:
        """The pieces of a conversation; None: the template refuses it, or does not show a reply.

        Raises:
            Uncuttable: no special token stands before a reply.
        """
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
