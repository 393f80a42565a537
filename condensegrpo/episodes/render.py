"""Messages to token ids: whole prompts, and the continuation of a prompt by ids.

A prompt is templated and tokenised once, at the start of a segment. From then on a conversation grows by ids alone:

    prompt_0 + output_0 + continuation_0 = prompt_1;   prompt_1 + output_1 + continuation_1 = prompt_2;   …

so that sampled ids reach the learner unchanged, however unusual their split of the text: there is no decode/encode
round trip. A prompt that a condenser rewrote is rendered whole, with the sampled ids of the replies that it keeps.
"""

import itertools
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from condensegrpo.core.errors import ConfigError, RolloutError
from condensegrpo.core.messages import Message, TextPart, ToolCall, Unit, flatten
from condensegrpo.core.protocols.pictures import ExpandsPictures
from condensegrpo.core.shared_sequence import SharedSequence, common_prefix
from condensegrpo.episodes.chat_template import ChatTemplate, tool_text
from condensegrpo.episodes.encoding import TextEncoder, unused_characters
from condensegrpo.episodes.parsing import ParsedReply, opens_thought, read_text
from condensegrpo.episodes.toolformats import BUILT_IN_FORMATS, Malformed, Native, ToolFormat, parsed_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CACHED_UNITS = 16384  # units whose ids are kept
OPENING = 64  # ids at the end of a prompt, among which what opens a reply is
THOUGHT = "qzxq thinks"  # a thought that occurs in no template
VERBATIM = "qzxq \"'\\\n\t<&> </think> {{ é }} qzxq"  # a result in which a template changes what it changes in any
Shape = tuple[object, ...]
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at words.",
        "parameters": {
            "type": "object",
            "properties": {
                "words": {"type": "string", "description": "to look at"},
                "times": {"type": "integer", "description": "how often"},
            },
            "required": ["words"],
        },
    },
}
ARGUMENTS = {"words": "a b", "times": 2}
CALL = ToolCall(id="call00000", name="look", arguments=json.dumps(ARGUMENTS))
PROBE = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="What is there?"),
    Message(role="assistant", content="I look.", reasoning="hm", tool_calls=(CALL,)),
    Message(role="tool", content="seen", name="look", tool_call_id="call00000"),
    Message(role="assistant", content="It is seen."),
    Message(role="user", content="And now?"),
)


class LocatedPrompt(NamedTuple):
    """A prompt, and the span of each message's content in it."""

    ids: tuple[int, ...]  # (P,) ending in the generation prompt
    spans: tuple[range, ...]  # of each message's content; everything else is the template's
    pictures: tuple[range, ...] = ()  # see ``Renderer.picture_spans``


class Tail(NamedTuple):
    """The text that a template writes after a reply: what answered it, and the opening of the next reply."""

    text: str
    marker: str  # in the text
    ids: "array[int]"


class Renderer:
    """Turns messages into prompts by the chat template of a tokenizer, with one set of tools, and ids into replies.

    The tools are in every prompt of a run, those of condensers included, so that all share the same first ids.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        tools: Sequence[Mapping[str, object]] = (),
        template_options: Mapping[str, object] | None = None,
        stop_ids: Sequence[int] = (),
        tool_format: ToolFormat | None = None,
        pictures: ExpandsPictures | None = None,
        encoder: TextEncoder | None = None,
    ) -> None:
        """A renderer of a tokenizer.

        Args:
            tokenizer: a fast tokenizer with a chat template.
            tools: schemas that the chat template shows; empty for tool formats that the system message explains.
            template_options: further variables of the template, such as ``enable_thinking``.
            stop_ids: that the model ends a reply with beside the tokenizer's, as its ``generation_config`` says.
            tool_format: in which replies call tools.
            pictures: what stands for a picture in a prompt; None: the model sees none.
            encoder: of the tokenizer, if there is one already.
        """
        if not tokenizer.chat_template:
            raise ConfigError(
                "setting up the prompts: the tokenizer has no chat template. Use the tokenizer of a chat model, or put "
                "a chat_template.jinja beside its tokenizer.json."
            )
        self._tokenizer = tokenizer
        self.encoder = encoder or TextEncoder(tokenizer)
        self._copy_with: Callable[..., Renderer] = partial(
            Renderer,
            tokenizer,
            template_options=template_options,
            stop_ids=stop_ids,
            tool_format=tool_format,
            pictures=pictures,
            encoder=self.encoder,
        )
        self.tool_format = tool_format
        self.chosen = "the chat template"  # which renderer this is, and why
        formats = (*BUILT_IN_FORMATS, *((tool_format,) if tool_format is not None else ()))
        self._template = ChatTemplate(
            tokenizer,
            self.encoder,
            tools=tools,
            options=template_options or {},
            formats=formats,
            description=tool_format.description(tools) if isinstance(tool_format, Native) and tools else "",
            pictures=pictures,
        )
        self.pictures = pictures
        self._pinned = lru_cache(maxsize=512)(self._rendered)  # of messages that were not sampled
        self._after_reply = lru_cache(maxsize=16384)(self._tail_ids)
        self._opening_text = lru_cache(maxsize=512)(self._decode)
        self._units: dict[int, tuple[Unit, array[int] | None]] = {}  # by identity: equal units may have other ids
        self._frames = dict[Shape, tuple[str, str] | None]()  # see ``_in_frame``
        self._alike = dict[Shape, bool]()  # whether a part is rendered by itself as it is in the whole conversation
        self._kept = dict[Shape, bool]()  # see ``keeps_replies``
        try:
            self._end_of_turn = self._find_end_of_turn()
        except RolloutError as error:
            raise ConfigError(f"setting up the prompts: {error}") from error
        ends = [stop for stop in (self._end_of_turn, tokenizer.eos_token_id, *stop_ids) if stop is not None]
        self.stop_ids: tuple[int, ...] = tuple(sorted(set(ends)))
        if not ends:
            raise ConfigError(
                "setting up the prompts: the tokenizer has no eos_token and its chat template puts no special token "
                "after a reply, so nothing could end one. Set eos_token in tokenizer_config.json."
            )
        self._closing = ends[0]
        self._by_tools: dict[str, Renderer] = {}  # that show other tools, by the text of these

    def store_media(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Messages of an environment or of tools as prompts hold them: the bytes of their pictures are stored."""
        if self.pictures is None:  # then they are refused where they are rendered
            return tuple(messages)
        return tuple(message.stored(self.pictures.media.write) for message in messages)

    def with_tools(self, tools: Sequence[Mapping[str, object]]) -> "Renderer":
        """The renderer that shows these tools instead: made once for each set of tools, of which a task has few."""
        text = tool_text(tools)
        if text == self._template.tool_text:
            return self
        if text not in self._by_tools:
            self._by_tools[text] = self._copy_with(tools=tools)
        return self._by_tools[text]

    # --- whole prompts

    def prompt(self, messages: Sequence[Message], units: Sequence[Unit] = ()) -> SharedSequence[int]:
        """The whole prompt (P,) of messages and the units after them, ending in the generation prompt.

        It has exactly the special tokens that the template writes (one BOS, if it writes one). The text of a special
        token inside a message is tokenised as the characters that it is made of. Of a sampled reply it has the ids that
        were sampled, or their text where the template leaves out thoughts.
        """
        pinned = tuple(messages)
        if not units:
            return SharedSequence(self._ids_of(pinned)[:])
        ids = None if self._template.reply_fields else self._composed(pinned, units)
        return SharedSequence(self._rendered(flatten(pinned, units)) if ids is None else ids)

    def count(self, messages: Sequence[Message]) -> int:
        """How many tokens ``prompt(messages)`` has."""
        return len(self._ids_of(tuple(messages)))

    def _ids_of(self, messages: tuple[Message, ...]) -> "array[int]":
        return (self._rendered if any(message.written for message in messages) else self._pinned)(messages)

    def _composed(self, pinned: tuple[Message, ...], units: Sequence[Unit]) -> "array[int] | None":
        """The ids of the pinned messages, and after them those of each unit, made once; None: render it whole.

        The first time for one, two and more units whose results have these roles it is compared with the whole: a
        template may number its messages, or move the system message to the last.
        """
        ids, roles = self._ids_of(pinned)[:], set[str]()
        for unit in units:
            known = self._units.get(id(unit))
            if known is None or known[0] is not unit:
                if len(self._units) >= CACHED_UNITS:
                    self._units.clear()
                known = self._units[id(unit)] = unit, self._unit_ids(_opening(pinned), unit)
            if known[1] is None:
                return None
            ids.extend(known[1])
            roles.update(message.role for message in unit.results)
        shape = (len(units[:3]), frozenset(roles), *(message.role for message in units[-1].results))
        if shape not in self._alike:
            self._alike[shape] = ids == self._rendered(flatten(pinned, units))
        return ids if self._alike[shape] else None

    def _unit_ids(self, opening: tuple[Message, ...], unit: Unit) -> "array[int] | None":
        """The ids that a unit adds to a prompt; None: they depend on other units (thoughts), or it was not sampled."""
        sampled = unit.reply.ids_in(self.encoder.vocabulary)
        if not sampled or unit.reply.reasoning:
            return None
        return array("I", sampled) + self._after_reply(opening, unit.reply, unit.results).ids

    def _rendered(self, messages: tuple[Message, ...]) -> "array[int]":
        """The prompt as an array: four bytes an id, where a tuple of numbers takes nine times as many."""
        marker, sampled = next(self._template.unused(messages)), dict[str, tuple[int, ...]]()
        text = self._template.render(messages, marker, sampled=sampled)
        return self.encoder.encode(text, marker, sampled)

    def content_spans(self, messages: Sequence[Message]) -> LocatedPrompt:
        """The whole prompt with the span of each message's content, in one pass over the text.

        For reading, never to be sampled from: the text is tokenised in pieces, so that ids at the borders of a message
        may be others than in ``prompt``. What the template leaves out of a message has an empty span.
        """
        marker, left, right = itertools.islice(self._template.unused(messages), 3)
        framed = self._template.render(_framed(messages, left, right), marker)
        pieces = re.split(f"{left}([0-9]+){right}", framed)  # text and numbers in turn: text, 0, text, 1, text, …
        ids, at = list(self.encoder.encode(pieces[0], marker)), dict[int, int]()
        for number, text in zip(pieces[1::2], pieces[2::2], strict=True):
            at[int(number)] = len(ids)
            ids += self.encoder.encode(text, marker)
        spans, last = [], 0
        for index in range(len(messages)):
            start = at.get(2 * index, last)  # reasoning that is left out may take the beginning with it
            last = at.get(2 * index + 1, start)
            spans.append(range(start, last))
        media = [part.sha256 for message in messages for part in message.media]
        return LocatedPrompt(ids=tuple(ids), spans=tuple(spans), pictures=self.picture_spans(ids, media))

    def picture_spans(self, ids: Sequence[int], media: Sequence[str]) -> tuple[range, ...]:
        """The span of each picture in the ids of a prompt: from the first to the last of its placeholders."""
        pictures, spans = self.pictures, list[range]()
        if pictures is None or not media:
            return ()
        indices = [index for index, token in enumerate(ids) if token == pictures.placeholder_id]
        for sha256 in media:
            count = pictures.expansion(sha256).count(pictures.placeholder)
            spans.append(range(indices[0], indices[count - 1] + 1))
            del indices[:count]
        return tuple(spans)

    # --- continuing by ids

    def continuation(
        self,
        context: Sequence[Message],
        reply: Message,
        observations: Sequence[Message],
        output_ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """The ids that lead from a sampled reply to the next prompt: prompt + output_ids + continuation.

        In ChatML, with the reply ``ok`` and the observation ``go on``:

            output_ids  ok<|im_end|>   →  ⏎<|im_start|>user⏎go on<|im_end|>⏎<|im_start|>assistant⏎
            output_ids  ok             →  <|im_end|>⏎<|im_start|>user⏎go on<|im_end|>⏎<|im_start|>assistant⏎

        The second was cut off by length or by a stop string: the closing token is then part of the prompt, not sampled,
        and so is never trained.

        Args:
            context: the messages before the reply.
            reply: what the policy said; only its position matters, its ids are ``output_ids``.
            observations: what answered it.
            output_ids: (A,) as sampled.
            prompt_ids: (P,) that they were sampled for; not given: those of ``context``.
        """
        tail = self._tail(context, reply, tuple(observations))
        if output_ids and output_ids[-1] in self.stop_ids:
            text = tail.text.lstrip()
            ids = tail.ids if text == tail.text else self.encoder.encode(text, tail.marker)
            if output_ids[-1] in (self._end_of_turn, *ids[:1]):
                return tuple(ids[1:])  # some templates end a last reply otherwise than one that is followed
        return tuple(tail.ids)

    def _tail(self, context: Sequence[Message], reply: Message, results: tuple[Message, ...]) -> Tail:
        """The text after a reply, rendered in a conversation of the opening, the reply and what answered it.

        The first time for results of these roles it is rendered in the whole conversation too, and from then on if that
        writes something else.
        """
        opening = _opening(context)
        short = self._after_reply(opening, reply, results)
        shape = ("tail", *(message.role for message in results))
        if len(opening) == len(context) or self._alike.get(shape):
            return short
        text, marker = self._tail_in(context, reply, results)
        self._alike.setdefault(shape, text.replace(marker, "") == short.text.replace(short.marker, ""))
        return Tail(text, marker, self.encoder.encode(text, marker))

    def _tail_ids(self, opening: tuple[Message, ...], reply: Message, results: tuple[Message, ...]) -> Tail:
        text, marker = self._in_frame(opening, reply, *results) or self._tail_in(opening, reply, results)
        return Tail(text, marker, self.encoder.encode(text, marker))

    def _in_frame(self, opening: tuple[Message, ...], reply: Message, *results: Message) -> tuple[str, str] | None:
        """The text after a reply that one plain text answered: the text, in what the template writes around it.

        The template writes the frame once for an opening, a role, a tool and a call, since it may repeat the opening in
        it; a frame that changes texts is not used.
        """
        content = results[0].content if len(results) == 1 else ""
        if self._template.reply_fields or not isinstance(content, str) or not content or content != content.strip():
            return None
        (result,), key = results, (opening, results[0].role, results[0].name, results[0].tool_call_id)
        if key not in self._frames:
            if len(self._frames) >= CACHED_UNITS:
                self._frames.clear()
            text, marker = self._tail_in(opening, reply, (replace(result, content=VERBATIM),))
            before, found, after = text.partition(VERBATIM)
            self._frames[key] = (before, after) if found and marker not in text else None
        if (frame := self._frames[key]) is None:
            return None
        marker = next(unused_characters((content,)))
        return f"{frame[0]}{self.encoder.escape(content, marker)}{frame[1]}", marker

    def _tail_in(self, context: Sequence[Message], reply: Message, observations: Sequence[Message]) -> tuple[str, str]:
        marker, sentinel = itertools.islice(self._template.unused((*context, reply, *observations)), 2)
        stand_in = Message(role="assistant", content=sentinel)
        if calls := self._template.reply_fields and reply.tool_calls[-1:]:
            last = replace(calls[0], arguments=json.dumps({"a": sentinel}, ensure_ascii=False))
            stand_in = replace(stand_in, content="", tool_calls=(*reply.tool_calls[:-1], last))
        tail = _after(self._template.render((*context, stand_in, *observations), marker), sentinel)
        return tail[self.encoder.first_of(tail, self.stop_ids)[0] :] if calls else tail, marker

    def keeps_replies(self, messages: Sequence[Message]) -> bool:
        """Whether the prompt of these messages is the prompt of their last reply, that reply, and then more.

        If so, continuing by ids gives what the template would show. Templates like Qwen3's drop the thinking of replies
        before the last user message: then it is False, and the next prompt is a rewritten one that must be declared.
        What an earlier prompt showed rewritten already does not count again, nor does white space around a reply (some
        templates trim it). True where there is no reply yet.

        It is found once for messages of a shape, in a small conversation: the opening, the latest reply whose thinking
        is still shown, and the last reply; in the whole one where the template does not write its parts alike.
        """
        newest = _last_reply(messages, len(messages))
        if newest < 0:
            return True
        if not self._alike.get(("tail", *(message.role for message in messages[newest + 1 :])), True):
            return self._keeps(messages)
        small = (*_opening(messages), *_thought_before(messages, newest), *messages[newest:])
        shape = tuple(map(_shape, small))
        if shape not in self._kept:
            self._kept[shape] = self._keeps(small)
        return self._kept[shape]

    def _keeps(self, messages: Sequence[Message]) -> bool:
        newest = _last_reply(messages, len(messages))
        context, reply, observations = messages[:newest], messages[newest], messages[newest + 1 :]
        if self._template.reply_fields:  # thought and calls need not be shown as they were written
            thought = THOUGHT if reply.reasoning else ""
            marked = replace(reply, reasoning=thought, written=None)
            shown_ids, before_ids = self._rendered((*context, marked, *observations)), self._rendered(tuple(context))
            return shown_ids[: len(before_ids)] == before_ids and thought in self._decode(shown_ids)
        marker, end = itertools.islice(self._template.unused(messages), 2)
        before = self._template.render(context, marker)
        said = self._reply_text(reply)
        marked = Message(role="assistant", content=said + end)
        shown, separator, _ = self._template.render((*context, marked, *observations), marker).partition(end)
        content = self.encoder.escape(said, marker)
        return bool(separator) and shown.startswith(before) and shown[len(before) :].strip() == content.strip()

    def check_roles(self, pinned: Sequence[Message], result: Message) -> None:
        """Check, before anything is sampled, that a conversation in which a tool is called can be shown.

        Args:
            pinned: system message and question of some problem.
            result: of a tool, as the tool format writes it.
        """
        call = ToolCall(id=result.tool_call_id or "", name=result.name or "", arguments="{}")
        calling = Message(
            role="assistant", content="calling", tool_calls=(call,) if self._template.reply_fields else ()
        )
        marker = next(self._template.unused((*pinned, calling, result)))
        cure = " Set rollout.tools.format=tagged: its results are user messages." if result.role == "tool" else ""
        try:
            texts = {
                self._template.render((*pinned, calling, replace(result, content=content)), marker)
                for content in ("1", "2")
            }
        except RolloutError as error:
            raise ConfigError(f"checking how tools are shown: {error}{cure}") from error
        if len(texts) == 1:
            raise ConfigError(
                f"checking how tools are shown: the chat template leaves out messages of role {result.role!r}, so the "
                f"policy would never see a tool's result.{cure or ' Use another chat template.'}"
            )

    def fault_of_calls(self) -> str | None:
        """Why calls as the chat template writes them cannot be read; None: they can."""
        shown = self._copy_with(tools=(TOOL,), tool_format=Native())
        if not shown._template.shows_tools:
            return "the chat template shows no tools"
        marker = next(unused_characters(()))
        try:
            before = shown._template.render(PROBE[:2], marker)
            reply = replace(PROBE[2], content="")
            text = shown._template.render((*PROBE[:2], reply), marker, generation_prompt=False)
        except RolloutError as error:
            return str(error)
        start = common_prefix(before, text)
        _, end = shown.encoder.first_of(text, shown.stop_ids, start)
        back = shown._read_back(text[start:end], before[:start])
        calls = Native().parse(back.message.text) if back.calls is None else back.calls
        read = [(call.name, parsed_arguments(call.arguments)) for call in calls if isinstance(call, ToolCall)]
        if read == [(CALL.name, ARGUMENTS)] and not back.thinking:
            return None
        faults = [call.reason for call in calls if isinstance(call, Malformed)]
        found = f"as {read[0]}" if read else f"as no call ({faults[0]})" if faults else "as no call"
        return f"a call that the chat template writes, {text[start:end]!r:.160}, is read {found:.160}"

    def _read_back(self, text: str, before: str) -> ParsedReply:
        return read_text(text, opened=opens_thought(before[self.encoder.last_control(before) :]))

    def check_calls(self) -> None:
        """Check, before anything is sampled, that calls in the form of the chat template can be read."""
        if self._template.shows_tools and (fault := self.fault_of_calls()):
            raise ConfigError(
                f"checking rollout.tools.format: found native, and {fault}. Set it to tagged, which works with any "
                f"chat template."
            )

    # --- replies

    def parse(self, output_ids: Sequence[int], prompt_ids: Sequence[int]) -> ParsedReply:
        """The thoughts, the text and the calls of a reply (A,) to a prompt (P,)."""
        ids = self._without_stop(output_ids)
        opened = opens_thought(self._opens_reply(prompt_ids))
        return read_text(self._decode(ids), ids, self.encoder.vocabulary, opened=opened)

    def _opens_reply(self, prompt_ids: Sequence[int]) -> str:
        """The text after the last control token of a prompt, thought tags aside."""
        return self._opening_text(self.encoder.after_last_control(prompt_ids[-OPENING:]))

    def text(self, output_ids: Sequence[int]) -> str:
        """The text of sampled ids (A,), without the stop id at their end. For reading, never to be tokenised."""
        return self._decode(self._without_stop(output_ids))

    def _without_stop(self, output_ids: Sequence[int]) -> Sequence[int]:
        return output_ids[:-1] if output_ids and output_ids[-1] in self.stop_ids else output_ids

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False))

    def _reply_text(self, reply: Message) -> str:
        """The text of a reply, thoughts included."""
        ids = reply.ids_in(self.encoder.vocabulary)
        return self._decode(ids) if ids else reply.text

    def text_ids(self, text: str) -> tuple[int, ...]:
        """The ids of a text as a policy could say it after a prompt."""
        return tuple(self.encoder.plain(text))

    @property
    def has_unknown(self) -> bool:
        """Whether the tokenizer has a token for what it does not know."""
        return self._tokenizer.unk_token_id is not None

    def unknown(self, text: str) -> tuple[int, tuple[str, ...]]:
        """How many tokens a text has, and the parts of it that the tokenizer does not know, repeated ones too."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        words = tuple(text[start:end] for token, (start, end) in pairs if token == self._tokenizer.unk_token_id)
        return len(encoded["input_ids"]), words

    def reply_ids(self, text: str, prompt_ids: Sequence[int] = ()) -> tuple[int, ...]:
        """The ids (A,) of a written reply as a policy should sample it, end-of-turn id included. For demonstrations.

        A thought that the prompt (P,) opens is closed first.
        """
        closes = prompt_ids and "</think>" not in text and opens_thought(self._opens_reply(prompt_ids))
        return (*self.text_ids(f"\n</think>\n\n{text}" if closes else text), self._closing)

    def _find_end_of_turn(self) -> int | None:
        """The special token that the template puts right after a reply, if it does."""
        marker, sentinel = itertools.islice(unused_characters(()), 2)
        talk = (Message(role="user", content="hi"), Message(role="assistant", content=sentinel))
        return self.encoder.leading_control(
            _after(self._template.render(talk, marker, generation_prompt=False), sentinel)
        )


def _shape(message: Message) -> Shape:
    """The properties of a message, beside its words, that a template may depend on."""
    thought = bool(message.reasoning) or "</think>" in message.text
    return message.role, not message.text.strip(), thought, bool(message.tool_calls), bool(message.media)


def _opening(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages before the first reply."""
    return tuple(itertools.takewhile(lambda message: message.role != "assistant", messages))


def _last_reply(messages: Sequence[Message], end: int) -> int:
    """The index of the last reply before ``end``; −1: there is none."""
    return next((index for index in range(end - 1, -1, -1) if messages[index].role == "assistant"), -1)


def _thought_before(messages: Sequence[Message], newest: int) -> Sequence[Message]:
    """The latest thoughtful reply before the newest, with what answered it, unless the user has spoken since.

    The template shows its thinking until the user speaks: after the newest reply, or never.
    """
    if any(message.role == "user" for message in messages[newest + 1 :]):
        end = newest
        while (start := _last_reply(messages, end)) >= 0:
            unit = messages[start:end]
            if any(message.role == "user" for message in unit):
                break
            if _shape(unit[0])[2]:
                return unit
            end = start
    return ()


def _framed(messages: Sequence[Message], left: str, right: str) -> list[Message]:
    """The messages with two numbers around what each says: 0 and 1 around the first."""
    framed = []
    for index, message in enumerate(messages):
        before, after = (TextPart(text=f"{left}{number}{right}") for number in (2 * index, 2 * index + 1))
        framed.append(replace(message, content=(before, *message.parts, after), tool_calls=()))
    return framed


def _after(text: str, sentinel: str) -> str:
    """The template's text after a stand-in reply."""
    _, separator, tail = text.rpartition(sentinel)
    if not separator:
        raise ConfigError(
            "rendering a conversation: the chat template does not show the content of an assistant message, so replies "
            "would be lost. Use another chat template."
        )
    return tail
