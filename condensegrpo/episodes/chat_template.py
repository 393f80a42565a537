"""Messages to the text of a chat template, in which only the template's own special tokens are control tokens."""

import json
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, cast

from jinja2 import TemplateError

from condensegrpo.core.errors import RolloutError
from condensegrpo.core.messages import MediaPart, Message, TextPart, ToolCall, one_by_user
from condensegrpo.core.protocols.pictures import ExpandsPictures
from condensegrpo.core.wording import plural
from condensegrpo.episodes.encoding import TextEncoder, unused_characters
from condensegrpo.episodes.toolformats import ToolFormat, parsed_arguments, with_instructions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_STAND_INS = 0xF0000  # the first of the private-use characters that stand for sampled ids
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")


def tool_text(tools: Sequence[Mapping[str, object]]) -> str:
    """Schemas as one text."""
    return json.dumps([dict(tool) for tool in tools], ensure_ascii=False, default=str)


class ChatTemplate:
    """The chat template of one tokenizer, with one set of tools and options."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        encoder: TextEncoder,
        *,
        tools: Sequence[Mapping[str, object]],
        options: Mapping[str, object],
        formats: Sequence[ToolFormat],
        description: str = "",
        pictures: ExpandsPictures | None = None,
    ) -> None:
        """``formats``: in which a reply may contain its calls; ``description``: of tools that the template hides."""
        self._tokenizer = tokenizer
        self._encoder = encoder
        self.tools = [dict(tool) for tool in tools] or None
        self._description = description
        self.tool_text = tool_text(tools)
        self._formats = tuple(formats)
        self._options = dict(options)
        self._pictures = pictures
        self._text_arguments = False  # whether the template wants the arguments of a call as text
        self.reply_fields = False  # whether the template is given reasoning and calls of a reply beside its text
        # some templates show contents that are lists of parts alone
        shown = Message(role="user", content="shown")
        self._lists_parts = False
        self._lists_parts = pictures is not None and shown.text not in (self._try(shown) or "")

    def unused(self, messages: Sequence[Message]) -> Iterator[str]:
        """Characters that occur neither in the tools nor in the messages: markers and stand-ins for a rendering."""
        return unused_characters((self.tool_text, *(text for message in messages for text in _texts(message))))

    def render(
        self,
        messages: Sequence[Message],
        marker: str,
        *,
        sampled: dict[str, tuple[int, ...]] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        """The template's text, in which the marker breaks up every special token that is not the template's own.

        Pictures are expanded, see ``ExpandsPictures``. Where the template wants user and assistant to alternate,
        messages of the user in a row are one, such as the results of two calls.

        Args:
            messages: to render.
            marker: a character that is unused in them.
            sampled: filled with the ids of sampled replies by the characters that stand for them in the text; None:
                replies are shown as text.
            generation_prompt: whether the text ends with what opens a reply.
        """
        messages = self.described(messages)
        if any(first.role == second.role == "user" for first, second in pairwise(messages)) and self._alternates:
            messages = one_by_user(messages)
        shown = tuple(part for message in messages for part in message.media)
        if shown and self._pictures is None:
            raise RolloutError(
                f"{self._doing(messages)} cannot show {shown[0].text}: the model sees no pictures, or is of no family "
                f"whose pictures this version knows (docs/how-to/train-with-pictures.md). Use one that does, or a task "
                f"of text alone."
            )
        if sampled is not None and any(_PRIVATE.search(message.text) for message in messages):
            sampled = None
        text = self._apply(messages, marker, sampled, generation_prompt)
        if sampled and any(text.count(stand_in) != 1 for stand_in in sampled):  # the template drops or escapes replies
            sampled.clear()
            text = self._apply(messages, marker, None, generation_prompt)
        return self._expanded(text, messages, shown) if self._pictures is not None else text

    def _apply(
        self,
        messages: Sequence[Message],
        marker: str,
        sampled: dict[str, tuple[int, ...]] | None,
        generation_prompt: bool,
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [self._entry(message, marker, sampled) for message in messages],
                    tools=self.tools,
                    add_generation_prompt=generation_prompt,
                    tokenize=False,
                    **self._options,
                )
            )
        except TemplateError as error:
            raise RolloutError(
                f"{self._doing(messages)} refuses them: {error}{_line(error)}. Use a condenser, task or tool format "
                f"that keeps to the order of roles that it wants."
            ) from error
        except Exception as error:  # the boundary to the code of the template
            if not self._text_arguments and any(message.tool_calls for message in messages):
                self._text_arguments = True
                try:
                    return self._apply(messages, marker, sampled, generation_prompt)
                except RolloutError:
                    self._text_arguments = False
            raise RolloutError(
                f"{self._doing(messages)} fails: {type(error).__name__}: {error}{_line(error)}. Fix it in "
                f"chat_template.jinja or tokenizer_config.json."
            ) from error

    def described(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with a system message that describes the tools, unless it does or the template shows them."""
        explained = any("<tool_call>" in message.text for message in messages if message.role == "system")
        if explained or not self._description or self.shows_tools:
            return messages
        return with_instructions(messages, self._description)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template shows the names of the tools."""
        names = [str(cast("dict[str, object]", tool["function"])["name"]) for tool in self.tools or ()]
        text = self._try(Message(role="user", content="1"))
        return text is None or all(name in text for name in names)

    def _expanded(self, text: str, messages: Sequence[Message], shown: Sequence[MediaPart]) -> str:
        """A rendering with each picture expanded in the place of its placeholder, which no content can write."""
        pictures = cast(ExpandsPictures, self._pictures)
        first, *rest = text.split(pictures.placeholder)
        if len(rest) != len(shown):
            raise RolloutError(
                f"{self._doing(messages)} wrote {len(rest)} placeholders {pictures.placeholder} for "
                f"{plural(len(shown), 'picture')}. Use the chat template of the model's processor, which has a place "
                f"for every picture (chat_template.jinja)."
            )
        expansions = (pictures.expansion(part.sha256) for part in shown)
        return "".join((first, *chain.from_iterable(zip(expansions, rest, strict=True))))

    @cached_property
    def _alternates(self) -> bool:
        """Whether the template takes a second message of the user after a reply, and refuses a third behind it."""
        user, reply = Message(role="user", content="1"), Message(role="assistant", content="1")
        return [self._try(user, reply, *[user] * number) is None for number in (1, 2)] == [False, True]

    @cached_property
    def _keeps_thoughts(self) -> bool:
        """Whether the template shows the content of every reply as it is, thinking included."""
        said = Message(role="assistant", content="<think>\na\n</think>\n\nb")
        user = Message(role="user", content="1")
        return (self._try(user, said, user, said) or "").count(said.text) == 2

    def _try(self, *messages: Message) -> str | None:
        """The text that the template writes for a few messages; None: it refuses them."""
        try:
            return self._apply(messages, "", None, True)
        except RolloutError:
            return None

    def _doing(self, messages: Sequence[Message]) -> str:
        roles = ", ".join(message.role for message in messages)
        model = f" of {self._tokenizer.name_or_path}" if self._tokenizer.name_or_path else ""
        return f"rendering {len(messages)} messages ({roles}): the chat template{model}"

    def _entry(self, message: Message, marker: str, sampled: dict[str, tuple[int, ...]] | None) -> dict[str, object]:
        """A message as chat templates take it. Calls that the content already contains are not shown twice."""
        content = self._content(message, marker, sampled)
        entry: dict[str, object] = {"role": message.role, "content": content}
        if message.media:
            entry["content"] = [
                {"type": "text", "text": self._encoder.escape(part.text, marker)}
                if isinstance(part, TextPart)
                else {"type": "image"}
                for part in message.parts
            ]
        elif self._lists_parts:
            entry["content"] = [{"type": "text", "text": content}]
        if message.role == "tool":
            entry["name"] = self._encoder.escape(message.name or "", marker)
            entry["tool_call_id"] = message.tool_call_id or ""
        if self.reply_fields and message.reasoning:
            entry["reasoning_content"] = entry["thinking"] = self._encoder.escape(message.reasoning, marker)
        if message.tool_calls and (self.reply_fields or self._calls_beside(message)):
            entry["tool_calls"] = self.calls(message.tool_calls, marker)
        return entry

    def calls(self, calls: Sequence[ToolCall], marker: str) -> list[dict[str, object]]:
        """Calls as chat templates take them."""
        return [
            {"id": call.id, "type": "function", "function": self._escaped(self._function(call), marker)}
            for call in calls
        ]

    def _content(self, message: Message, marker: str, sampled: dict[str, tuple[int, ...]] | None) -> str:
        """The text of a message; of a sampled reply what was sampled, unless the template takes it apart."""
        ids = message.ids_in(self._encoder.vocabulary)
        if self.reply_fields or not (ids or message.reasoning):
            return self._encoder.escape(message.text, marker)
        if not ids:
            return self._encoder.escape(f"<think>\n{message.reasoning}\n</think>\n\n{message.text}", marker)
        if sampled is None or (message.reasoning and not self._keeps_thoughts):
            text = self._encoder.decoded(ids, marker)
            return text if message.text or not message.reasoning else closed_thought(text)
        sampled[stand_in := chr(_STAND_INS + len(sampled))] = ids
        return stand_in

    def _calls_beside(self, message: Message) -> bool:
        """Whether the template is given the calls of a message: those that its content already contains it is not."""
        content, calls = message.text, message.tool_calls
        if all(call.arguments in content and call.name in content for call in calls):
            return False
        for form in self._formats:  # written as code, or with escapes
            if calls == tuple(call for call in form.parse(content) if isinstance(call, ToolCall)):
                return False
        return True

    def _function(self, call: ToolCall) -> dict[str, object]:
        """A call as templates take it: its arguments as an object, or as text where they are none."""
        arguments: object = call.arguments
        with suppress(ValueError):
            arguments = call.arguments if self._text_arguments else parsed_arguments(call.arguments)
        return {"name": call.name, "arguments": arguments}

    def _escaped(self, value: object, marker: str) -> object:
        if isinstance(value, str):
            return self._encoder.escape(value, marker)
        if isinstance(value, dict):
            return {self._escaped(key, marker): self._escaped(item, marker) for key, item in value.items()}
        if isinstance(value, list):
            return [self._escaped(item, marker) for item in value]
        return value


def closed_thought(text: str) -> str:
    """A reply that is one unfinished thought, with the tags that it lacks: no template takes it for speech then."""
    opened = text if text.lstrip().startswith("<think>") else f"<think>\n{text}"
    return opened if "</think>" in text else f"{opened}\n</think>\n\n"


def _line(error: Exception) -> str:
    """The line of the template in which an error was raised, if that is known."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" (line {lines[-1]} of the template)" if lines else ""


def _texts(message: Message) -> Iterator[str]:
    yield from (message.text, message.reasoning, message.name or "")
    for call in message.tool_calls:
        yield from (call.name, call.arguments)
