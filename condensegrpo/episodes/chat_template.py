"""Messages to the text of a chat template, in which only the template's own special tokens are control tokens."""

import json
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from condensegrpo.core.errors import RolloutError
from condensegrpo.core.messages import MediaPart, Message, TextPart, ToolCall
from condensegrpo.core.protocols.pictures import ExpandsPictures
from condensegrpo.core.wording import plural
from condensegrpo.episodes.encoding import TextEncoder, place
from condensegrpo.episodes.toolformats import ToolFormat, parsed_arguments, with_instructions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Entry = dict[str, Any]  # a message as chat templates take it


def tool_text(tools: Sequence[Mapping[str, object]]) -> str:
    """Schemas as one text."""
    return json.dumps([dict(tool) for tool in tools], ensure_ascii=False, default=str)


class Arguments(dict[str, object]):
    """The arguments of a call: an object, and its JSON where a template adds or writes them as a text."""

    def __init__(self, value: Mapping[str, object], text: str) -> None:
        """``text``: as the model wrote it."""
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        """As written."""
        return self._text

    def __add__(self, other: object) -> str:
        """As written, before another text."""
        return f"{self}{other}"

    def __radd__(self, other: object) -> str:
        """As written, after another text."""
        return f"{other}{self}"


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
        fields: bool = False,
        description: str = "",
        pictures: ExpandsPictures | None = None,
    ) -> None:
        """What to render with.

        Args:
            formats: in which a reply may contain its calls.
            fields: whether the template is given reasoning and calls of a reply beside its text.
            description: of tools that the template hides.
        """
        self._tokenizer = tokenizer
        self._encoder = encoder
        self.tools = [dict(tool) for tool in tools] or None
        self._description = description
        self.tool_text = tool_text(tools)
        self._formats = tuple(formats)
        self._options = dict(options)
        self._pictures = pictures
        self.fields = fields
        # some templates show contents that are lists of parts alone
        shown = Message(role="user", content="shown")
        self._lists_parts = False
        self._lists_parts = pictures is not None and shown.text not in (self._tried(shown) or "")

    def render(
        self,
        messages: Sequence[Message],
        *,
        placed: Collection[int] = (),
        framed: bool = False,
        generation_prompt: bool = True,
    ) -> str:
        """The template's text, escaped: its special tokens are the template's own, see ``TextEncoder``.

        Pictures are expanded, see ``ExpandsPictures``. Where the template wants user and assistant to alternate,
        messages of the user in a row are one, such as the results of two calls.

        Args:
            messages: to render.
            placed: indices of replies that their ``place`` stands for; it is in the last call of one with calls.
            framed: whether the places of twice the index and the next number are around the content of each message.
            generation_prompt: whether the text ends with what opens a reply.
        """
        described = self.described(messages)
        shown = tuple(part for message in described for part in message.media)
        if shown and self._pictures is None:
            raise RolloutError(
                f"{self._doing(described)} cannot show {shown[0].text}: the model sees no pictures, or is of no family "
                f"whose pictures this version knows (docs/how-to/train-with-pictures.md). Use one that does, or a task "
                f"of text alone."
            )
        entries = [
            self.entry(message, number, placed=number in placed, framed=framed)
            for number, message in enumerate(described, start=len(messages) - len(described))
        ]
        try:
            text = self._written(described, entries, generation_prompt)
        except RolloutError:
            if len(joined := _one_by_user(entries)) == len(entries):
                raise
            text = self._written(described, joined, generation_prompt)
        return self._expanded(text, described, shown) if self._pictures is not None else text

    def _written(self, messages: Sequence[Message], entries: list[Entry], generation_prompt: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    entries,
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
        text = self._tried(Message(role="user", content="1"))
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
    def _keeps_thoughts(self) -> bool:
        """Whether the template shows the content of every reply as it is, thinking included."""
        said = Message(role="assistant", content="<think>\na\n</think>\n\nb")
        user = Message(role="user", content="1")
        return (self._tried(user, said, user, said) or "").count(said.text) == 2

    def _tried(self, *messages: Message) -> str | None:
        """What the template writes for a few messages; None: it refuses them."""
        try:
            return self._written(messages, [self.entry(message) for message in messages], True)
        except RolloutError:
            return None

    def _doing(self, messages: Sequence[Message]) -> str:
        roles = ", ".join(message.role for message in messages)
        model = f" of {self._tokenizer.name_or_path}" if self._tokenizer.name_or_path else ""
        return f"rendering {len(messages)} messages ({roles}): the chat template{model}"

    def entry(self, message: Message, number: int = 0, *, placed: bool = False, framed: bool = False) -> Entry:
        """A message as chat templates take it. Calls that the content already contains are not shown twice."""
        escape = self._encoder.escape
        before, after = (place(2 * number), place(2 * number + 1)) if framed else ("", "")
        content: str | list[Entry] = place(number) if placed else self._content(message, before, after)
        if message.media:
            content = [
                {"type": "text", "text": escape(part.text)} if isinstance(part, TextPart) else {"type": "image"}
                for part in message.parts
            ]
            if framed:
                content = [*_parts(before), *content, *_parts(after)]
        entry: Entry = {"role": message.role, "content": _parts(content) if self._lists_parts else content}
        if message.role == "tool":
            entry["name"] = escape(message.name or "")
            entry["tool_call_id"] = message.tool_call_id or ""
        if self.fields and message.reasoning:
            entry["reasoning_content"] = entry["thinking"] = escape(message.reasoning)
        if not framed and message.tool_calls and (self.fields or self._calls_beside(message)):
            entry["tool_calls"] = self._calls(message.tool_calls)
            if placed and self.fields:
                arguments = {"a": content}
                entry["content"] = ""
                entry["tool_calls"][-1]["function"]["arguments"] = Arguments(arguments, f'{{"a": "{content}"}}')
        return entry

    def _calls(self, calls: Sequence[ToolCall]) -> list[Entry]:
        """Calls as chat templates take them."""
        return [{"id": call.id, "type": "function", "function": self._function(call)} for call in calls]

    def shows_sampled(self, reply: Message) -> bool:
        """Whether a place can stand for the ids of a sampled reply: the template takes nothing out of it."""
        return not self.fields and (not reply.reasoning or self._keeps_thoughts)

    def _content(self, message: Message, before: str, after: str) -> str:
        """The text of a message between two others; of a sampled reply what was sampled."""
        ids = () if self.fields or before else message.ids_in(self._encoder.vocabulary)
        if ids:
            text = self._encoder.decoded(ids)
            return text if message.text or not message.reasoning else closed_thought(text)
        text = f"{before}{self._encoder.escape(message.text)}{after}"
        if self.fields or not message.reasoning:
            return text
        return self._encoder.escape(f"<think>\n{message.reasoning}\n</think>\n\n") + text

    def _calls_beside(self, message: Message) -> bool:
        """Whether the template is given the calls of a message: those that its content already contains it is not."""
        content, calls = message.text, message.tool_calls
        if all(call.arguments in content and call.name in content for call in calls):
            return False
        for form in self._formats:  # written as code, or with escapes
            if calls == tuple(call for call in form.parse(content) if isinstance(call, ToolCall)):
                return False
        return True

    def _function(self, call: ToolCall) -> Entry:
        """A call as templates take it: its arguments as an object, or as text where they are none."""
        name, arguments = self._encoder.escape(call.name), self._encoder.escape(call.arguments)
        with suppress(ValueError):
            return {"name": name, "arguments": Arguments(self._escaped(parsed_arguments(call.arguments)), arguments)}
        return {"name": name, "arguments": arguments}

    def _escaped(self, value: Any) -> Any:  # noqa: ANN401  what JSON holds
        if isinstance(value, str):
            return self._encoder.escape(value)
        if isinstance(value, dict):
            return {self._escaped(key): self._escaped(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._escaped(item) for item in value]
        return value


def closed_thought(text: str) -> str:
    """A reply that is one unfinished thought, with the tags that it lacks: no template takes it for speech then."""
    opened = text if text.lstrip().startswith("<think>") else f"<think>\n{text}"
    return opened if "</think>" in text else f"{opened}\n</think>\n\n"


def _line(error: Exception) -> str:
    """Where in the template the error was raised, if that is known."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" (line {lines[-1]} of the template)" if lines else ""


def _parts(content: str | list[Entry]) -> list[Entry]:
    """A content as a list of parts."""
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _one_by_user(entries: Sequence[Entry]) -> list[Entry]:
    """The messages with those of the user in a row as one, line by line; it answers the call of the first of them."""
    joined = list[Entry]()
    for entry in entries:
        if joined and joined[-1]["role"] == entry["role"] == "user":
            first, second = joined[-1]["content"], entry["content"]
            both = isinstance(first, str) and isinstance(second, str)
            content = f"{first}\n{second}" if both else [*_parts(first), *_parts("\n"), *_parts(second)]
            joined[-1] = {**joined[-1], "content": content}
        else:
            joined.append(entry)
    return joined
