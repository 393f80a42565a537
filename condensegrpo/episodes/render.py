"""Messages to token ids: whole prompts, and the continuation of a prompt by ids.

A prompt is templated and tokenised once, at the start of a segment. From then on a conversation grows by ids alone:

    prompt_0 + output_0 + continuation_0 = prompt_1;   prompt_1 + output_1 + continuation_1 = prompt_2;   …

so that sampled ids reach the learner unchanged, however unusual their split of the text: there is no decode/encode
round trip. A prompt that a condenser rewrote is rendered whole, with the sampled ids of the replies that it keeps.
"""

import itertools
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from condensegrpo.core.errors import ConfigError, RolloutError
from condensegrpo.core.messages import Message, Role, ToolCall, Unit, flatten
from condensegrpo.core.protocols.pictures import ExpandsPictures
from condensegrpo.core.shared_sequence import SharedSequence, common_prefix
from condensegrpo.episodes.chat_template import ChatTemplate, tool_text
from condensegrpo.episodes.encoding import CACHED, TextEncoder, pieces, place
from condensegrpo.episodes.parsing import ParsedReply, opens_thought, read_text
from condensegrpo.episodes.toolcalls import BUILT_IN_FORMATS
from condensegrpo.episodes.toolformats import Malformed, Native, ToolFormat, parsed_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

OPENING = 64  # ids at the end of a prompt, among which what opens a reply is
WORDS, THOUGHT = "qzxq", "qzxq thinks"  # which nobody says or thinks
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


class Located(NamedTuple):
    """A prompt, and the span of each message's content in it."""

    ids: tuple[int, ...]  # (P,) ending in the generation prompt
    spans: tuple[range, ...]  # of each message's content; everything else is the template's
    pictures: tuple[range, ...] = ()  # see ``Renderer.picture_spans``


class Tail(NamedTuple):
    """What a template writes after a reply: what answered it, and what opens the next reply."""

    text: str
    ids: "array[int]"
    local: bool  # whether it is the same whatever units are before the reply


class Renderer:
    """Turns messages into prompts by the chat template of a tokenizer, with one set of tools, and ids into replies.

    The tools are in every prompt of a run, those of condensers included, so that all share the same first ids.
    """

    fields = False  # whether reasoning and calls of a reply are beside its text

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
        """What to render with.

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
        self.chosen = "the chat template"  # which renderer this is, and why
        self.pictures = pictures
        self._template_options = template_options or {}
        self._opening_text = lru_cache(maxsize=512)(self._decode)
        self._show(tools, tool_format)
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
        self._by_tools = {self._template.tool_text: self}

    def _show(self, tools: Sequence[Mapping[str, object]], tool_format: ToolFormat | None) -> None:
        """Set the tools that prompts show, and the format of calls."""
        self.tool_format = tool_format
        self._template = ChatTemplate(
            self._tokenizer,
            self.encoder,
            tools=tools,
            options=self._template_options,
            formats=BUILT_IN_FORMATS if tool_format is None else (*BUILT_IN_FORMATS, tool_format),
            fields=self.fields,
            description=tool_format.description(tools) if isinstance(tool_format, Native) and tools else "",
            pictures=self.pictures,
        )
        self._pinned = lru_cache(maxsize=512)(self._rendered)  # of messages that nobody sampled
        self._after_reply = lru_cache(maxsize=CACHED)(self._tail)
        self._is_local = lru_cache(maxsize=512)(self._tried_local)
        self._keeps = lru_cache(maxsize=512)(self._tried_keep)

    def _showing(self, tools: Sequence[Mapping[str, object]], tool_format: ToolFormat | None) -> Self:
        other = copy(self)
        other._show(tools, tool_format)
        return other

    def with_tools(self, tools: Sequence[Mapping[str, object]]) -> "Renderer":
        """The renderer that shows these tools instead: made once for each set of tools, of which a task has few."""
        text = tool_text(tools)
        if text not in self._by_tools:
            self._by_tools[text] = self._showing(tools, self.tool_format)
        return self._by_tools[text]

    def store_media(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Messages of an environment or of tools as prompts hold them: the bytes of their pictures are stored."""
        if self.pictures is None:  # then they are refused where they are rendered
            return tuple(messages)
        return tuple(message.stored(self.pictures.media.write) for message in messages)

    # --- whole prompts

    def prompt(self, messages: Sequence[Message], units: Sequence[Unit] = ()) -> SharedSequence[int]:
        """The whole prompt (P,) of messages and the units after them, ending in the generation prompt.

        It has exactly the special tokens that the template writes (one BOS, if it writes one). The text of a special
        token inside a message is tokenised as the characters that it is made of. Of a sampled reply it has the ids that
        were sampled, or their text where the template leaves out thoughts.
        """
        pinned = tuple(messages)
        composed = None if units and self.fields else self._composed(pinned, units)
        return SharedSequence(self._rendered(flatten(pinned, units)) if composed is None else composed)

    def count(self, messages: Sequence[Message]) -> int:
        """How many tokens ``prompt(messages)`` has."""
        return len(self._whole(tuple(messages)))

    def _whole(self, messages: tuple[Message, ...]) -> "array[int]":
        return (self._rendered if any(message.written for message in messages) else self._pinned)(messages)

    def _composed(self, pinned: tuple[Message, ...], units: Sequence[Unit]) -> "array[int] | None":
        """The ids of the pinned messages, and after them those that each unit adds; None: render it whole.

        What a unit adds depends on the others if it has a thought, or was not sampled as it is.
        """
        ids, opening = self._whole(pinned)[:], _opening(pinned)
        for unit in units:
            sampled = unit.reply.ids_in(self.encoder.vocabulary)
            if not sampled or unit.reply.reasoning or not (tail := self._after_reply(opening, unit.results)).local:
                return None
            ids.extend(sampled)
            ids.extend(tail.ids)
        return ids

    def _rendered(self, messages: tuple[Message, ...]) -> "array[int]":
        """The prompt as an array: four bytes an id, where a tuple of numbers takes nine times as many."""
        vocabulary = self.encoder.vocabulary
        placed = {
            index: ids
            for index, message in enumerate(messages)
            if (ids := message.ids_in(vocabulary)) and self._template.shows_sampled(message)
        }
        text = self._template.render(messages, placed=placed)
        if any(text.count(place(index)) != 1 for index in placed):  # the template drops or escapes replies
            text = self._template.render(messages)
        return self.encoder.encode(text, placed)

    def content_spans(self, messages: Sequence[Message]) -> Located:
        """The whole prompt with the span of each message's content, in one pass over the text.

        For reading, never to be sampled from: the text is tokenised in pieces, so that ids at the borders of a message
        may be others than in ``prompt``. What the template leaves out of a message has an empty span.
        """
        first, *rest = pieces(self._template.render(messages, framed=True))
        ids, at = list(self.encoder.encode(first)), dict[int, int]()
        for number, text in zip(rest[::2], rest[1::2], strict=True):
            at[int(number)] = len(ids)
            ids += self.encoder.encode(text)
        spans, last = [], 0
        for index in range(len(messages)):
            start = at.get(2 * index, last)  # reasoning that is left out may take the beginning with it
            last = at.get(2 * index + 1, start)
            spans.append(range(start, last))
        media = [part.sha256 for message in messages for part in message.media]
        return Located(ids=tuple(ids), spans=tuple(spans), pictures=self.picture_spans(ids, media))

    def picture_spans(self, ids: Sequence[int], media: Sequence[str]) -> tuple[range, ...]:
        """Where each picture of a prompt is in its ids: from the first to the last of its placeholders."""
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
        tail = self._after_reply(_opening(context), results := tuple(observations), calls := self._calls_of(reply))
        if not tail.local:
            tail = self._after_reply(tuple(context), results, calls)
        if output_ids and output_ids[-1] in self.stop_ids:
            text = tail.text.lstrip()
            ids = tail.ids if text == tail.text else self.encoder.encode(text)
            if output_ids[-1] in (self._end_of_turn, *ids[:1]):
                return tuple(ids[1:])  # some templates end a last reply otherwise than one that is followed
        return tuple(tail.ids)

    def _calls_of(self, reply: Message) -> tuple[ToolCall, ...]:
        """The calls of a reply that are beside its text."""
        return reply.tool_calls if self.fields else ()

    def _tail(
        self, context: tuple[Message, ...], results: tuple[Message, ...], calls: tuple[ToolCall, ...] = ()
    ) -> Tail:
        text = self._text_after(context, results, calls)
        local = self._is_local(_roles(_opening(context)), _roles(results), called=bool(calls))
        return Tail(text, self.encoder.encode(text), local)

    def _text_after(
        self, context: tuple[Message, ...], results: tuple[Message, ...], calls: tuple[ToolCall, ...]
    ) -> str:
        """What the template writes after a reply, which it is given as a place."""
        stand_in = Message(role="assistant", content="", tool_calls=calls)
        text = self._template.render((*context, stand_in, *results), placed=(len(context),))
        tail = _after(text, place(len(context)))
        ends = (begin for token, begin, _ in self.encoder.controls(tail) if token in self.stop_ids)
        return tail[next(ends, len(tail)) :] if calls else tail

    def _tried_local(self, opening: tuple[Role, ...], results: tuple[Role, ...], *, called: bool) -> bool:
        """Whether the template writes a unit alike whatever units are before it, tried with made-up messages.

        A template may number its messages, or move the system message to the last.
        """
        start, answers = (tuple(map(_made_up, roles)) for roles in (opening, results))
        calls = (CALL,) if called else ()
        reply = replace(_made_up("assistant"), tool_calls=calls)
        try:
            tail = self._text_after(start, answers, calls)
            if self.fields:
                return tail == self._text_after((*start, *2 * (reply, *answers)), answers, calls)
            first, whole = (self._template.render((*start, *n * (reply, *answers))) for n in (0, 3))
        except RolloutError:
            return False
        return whole == first + 3 * (reply.text + tail)

    def keeps_replies(self, messages: Sequence[Message]) -> bool:
        """Whether the prompt of these messages is the prompt of their last reply, that reply, and then more.

        If so, continuing by ids gives what the template would show. Templates like Qwen3's drop the thinking of replies
        before the last user message: then it is False, and the next prompt is a rewritten one that must be declared.
        What an earlier prompt showed rewritten already does not count again, nor does white space around a reply (some
        templates trim it). True where there is no reply yet.

        It is tried with made-up messages for the opening, the latest reply whose thinking is still shown, and the last
        reply; for the whole conversation where the template does not write its units alike.
        """
        newest = _last_reply(messages)
        if newest < 0:
            return True
        opening, called = _opening(messages), bool(self._calls_of(messages[newest]))
        if self._is_local(_roles(opening), _roles(messages[newest + 1 :]), called=called):
            messages = (*opening, *_thought_before(messages, newest), *messages[newest:])
        return self._keeps(tuple(map(self._like, messages)))

    def _like(self, message: Message) -> Message:
        """A made-up message of which a template can tell what it can tell of this one, beside its words."""
        blank, thought = not message.text.strip(), message.role == "assistant" and _thinks(message)
        return _made_up(message.role, blank, thought, self.fields, bool(message.tool_calls))

    def _tried_keep(self, messages: tuple[Message, ...]) -> bool:
        newest, fields = _last_reply(messages), self.fields
        written: Callable[[tuple[Message, ...]], Sequence[Any]] = self._rendered if fields else self._template.render
        before, shown, reply = written(messages[:newest]), written(messages), messages[newest]
        if shown[: len(before)] != before:
            return False
        rest: Any = shown[len(before) :]  # thought and calls need not be shown as they were written
        return reply.reasoning in self._decode(rest) if fields else rest.lstrip().startswith(reply.text)

    def check_roles(self, pinned: Sequence[Message], result: Message) -> None:
        """Check, before anything is sampled, that a conversation in which a tool is called can be shown.

        Args:
            pinned: system message and question of some problem.
            result: of a tool, as the tool format writes it.
        """
        call = ToolCall(id=result.tool_call_id or "", name=result.name or "", arguments="{}")
        called = Message(role="assistant", content="calling", tool_calls=(call,) if self.fields else ())
        cure = " Set rollout.tools.format=tagged: its results are user messages." if result.role == "tool" else ""
        try:
            texts = {
                self._template.render((*pinned, called, replace(result, content=content))) for content in ("1", "2")
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
        shown = self._showing((TOOL,), Native())
        if not shown._template.shows_tools:
            return "the chat template shows no tools"
        try:
            before = shown._template.render(PROBE[:2])
            reply = replace(PROBE[2], content="")
            text = shown._template.render((*PROBE[:2], reply), generation_prompt=False)
        except RolloutError as error:
            return str(error)
        start = common_prefix(before, text)
        controls = shown.encoder.controls(text, start)
        end = next((end for token, _, end in controls if token in shown.stop_ids), len(text))
        back = shown._read_back(text[start:end], before[:start])
        calls = Native().parse(back.message.text) if back.calls is None else back.calls
        read = [(call.name, parsed_arguments(call.arguments)) for call in calls if isinstance(call, ToolCall)]
        if read == [(CALL.name, ARGUMENTS)] and not back.thinking:
            return None
        faults = [call.reason for call in calls if isinstance(call, Malformed)]
        found = f"as {read[0]}" if read else f"as no call ({faults[0]})" if faults else "as no call"
        return f"a call that the chat template writes, {text[start:end]!r:.160}, is read {found:.160}"

    def _read_back(self, text: str, before: str) -> ParsedReply:
        return read_text(text, opened=opens_thought(self.encoder.after_controls(before)))

    def check_calls(self) -> None:
        """Check, before anything is sampled, that calls in the form of the chat template can be read."""
        if self._template.shows_tools and (fault := self.fault_of_calls()):
            raise ConfigError(
                f"checking rollout.tools.format: found native, and {fault}. Set it to tagged, which works with any "
                f"chat template."
            )

    # --- replies

    def parse(self, output_ids: Sequence[int], prompt_ids: Sequence[int]) -> ParsedReply:
        """What a reply (A,) to a prompt (P,) thought, said and called."""
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
        talk = (Message(role="user", content="hi"), Message(role="assistant", content=""))
        text = self._template.render(talk, placed=(1,), generation_prompt=False)
        controls = self.encoder.controls(_after(text, place(1)).lstrip())
        return next((token for token, begin, _ in controls if not begin), None)


@lru_cache
def _made_up(
    role: Role, blank: bool = False, thought: bool = False, fields: bool = False, called: bool = False
) -> Message:
    """A message of a role; ``fields``: whether its thought and its calls are beside its text."""
    words = "" if blank else WORDS
    if role == "tool":
        return replace(PROBE[3], content=words)
    if fields:
        reasoning, calls = (THOUGHT if thought else ""), ((CALL,) if called else ())
        return Message(role=role, content=words, reasoning=reasoning, tool_calls=calls)
    end = "" if blank else "\n</think>\n\n"
    return Message(role=role, content=f"<think>\n{THOUGHT}{end}{words}" if thought else words)


def _thinks(message: Message) -> bool:
    return bool(message.reasoning) or "</think>" in message.text


def _roles(messages: Sequence[Message]) -> tuple[Role, ...]:
    return tuple([message.role for message in messages])


def _opening(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages before the first reply."""
    return tuple(itertools.takewhile(lambda message: message.role != "assistant", messages))


def _last_reply(messages: Sequence[Message]) -> int:
    """The index of the last reply; −1: there is none."""
    return next((index for index in range(len(messages) - 1, -1, -1) if messages[index].role == "assistant"), -1)


def _thought_before(messages: Sequence[Message], newest: int) -> Sequence[Message]:
    """The latest thoughtful reply before the newest, with what answered it, unless the user has spoken since.

    The template shows its thinking until the user speaks: after the newest reply, or never.
    """
    end = newest if any(message.role == "user" for message in messages[newest + 1 :]) else 0
    for index in range(end - 1, -1, -1):
        message = messages[index]
        if message.role == "user":
            break
        if message.role == "assistant":
            if _thinks(message):
                return messages[index:end]
            end = index
    return ()


def _after(text: str, sentinel: str) -> str:
    """The template's text after a stand-in reply."""
    _, separator, tail = text.rpartition(sentinel)
    if not separator:
        raise ConfigError(
            "rendering a conversation: the chat template does not show the content of an assistant message, so replies "
            "would be lost. Use another chat template."
        )
    return tail
