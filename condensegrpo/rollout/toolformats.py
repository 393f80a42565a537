"""How tool calls stand in a reply: the formats whose calls are JSON, and what every format offers.

A format never raises for what a model writes: a call that cannot be read is a ``Malformed`` with the reason. Calls
inside ``<think>…</think>`` do not count.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.rollout import strictjson

MAX_CALLS = 32  # read from one reply; a model in a loop writes thousands
MAX_NAME = 64  # characters of a tool's name
TOO_MANY = f"a reply may hold {MAX_CALLS} tool calls, the rest was not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A tool call that could not be read."""

    reason: str  # one line


class ToolFormat(Protocol):
    """How calls stand in a reply, and how results stand in the conversation."""

    @property
    def opening(self) -> str:
        """The markup that opens a call."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """What ends a reply in this format beside the stop ids."""

    def parse(self, text: str) -> tuple[ToolCall | Malformed, ...]:
        """All calls of a reply in order, at most ``MAX_CALLS`` and one fault for the rest. Never raises."""

    def result(self, call_id: str, name: str, text: str) -> Message:
        """The message that shows a result; ``name`` is empty when the call could not be read."""

    def instructions(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """What the system message must tell the model; empty where the chat template does so itself."""


class Native:
    """The format of Hermes, Qwen and most chat templates: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

    opening: str = "<tool_call>"
    stop_strings: tuple[str, ...] = ()

    def parse(self, text: str) -> tuple[ToolCall | Malformed, ...]:
        """All calls of a reply; there may be several in a row."""
        return _parse(text, _Markup(opening=self.opening, closing="</tool_call>", arguments="arguments"))

    def result(self, call_id: str, name: str, text: str) -> Message:
        """A message of role ``tool``."""
        return Message(role="tool", content=text, tool_call_id=call_id, name=name or None)

    def instructions(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Nothing: the chat template shows the schemas."""
        return ""


class Tagged:
    """A format for models without a tool template: ``<tool>{"name": …, "args": {…}}</tool>``, results by the user."""

    opening: str = "<tool>"
    stop_strings: tuple[str, ...] = ("</tool>",)

    def parse(self, text: str) -> tuple[ToolCall | Malformed, ...]:
        """All calls of a reply; the stop string lets there be one."""
        return _parse(text, _Markup(opening=self.opening, closing="</tool>", arguments="args"))

    def result(self, call_id: str, name: str, text: str) -> Message:
        """A user message with the result in ``<result>`` tags."""
        return Message(role="user", content=f"<result>{text}</result>", tool_call_id=call_id, name=name or None)

    def instructions(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """The tools by schema, and how to call one; nothing without tools."""
        if not schemas:
            return ""
        shown = "\n".join(json.dumps(_described(schema), ensure_ascii=False) for schema in schemas)
        return (
            'You can use tools. To call one, write <tool>{"name": "…", "args": {…}}</tool> and stop there; '
            f"its result follows in <result>…</result>. The tools, with the schema of their args:\n{shown}"
        )


def parsed_arguments(raw: str) -> dict[str, Any]:
    """The arguments of a call, from the JSON that the model wrote: an object, or an object inside a JSON string.

    Raises:
        ValueError: it is not that; the message is one line.
    """
    value = strictjson.loads(raw)
    if isinstance(value, str):
        value = strictjson.loads(value)
    if not isinstance(value, dict):
        raise ValueError(f"the arguments are no JSON object but {quoted(raw)}")
    return value


def _described(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without its wrapper and its return type."""
    function: Mapping[str, Any] = schema["function"]
    return {key: function[key] for key in ("name", "description", "parameters")}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Markup:
    opening: str
    closing: str
    arguments: str  # the key of the arguments

    def fault(self, reason: str) -> Malformed:
        return Malformed(
            reason=f'{reason}; a call is written {self.opening}{{"name": "…", "{self.arguments}": {{…}}}}{self.closing}'
        )


def _parse(text: str, markup: _Markup) -> tuple[ToolCall | Malformed, ...]:
    """All calls of a text that stand outside of its thinking.

    A ``</think>`` that nothing opened ends the thinking that a template's generation prompt opened: all before it goes.
    """
    marks = re.compile("|".join(map(re.escape, (markup.opening, "<think>", "</think>"))))
    found: list[ToolCall | Malformed] = []
    thought = False
    position = 0
    while mark := marks.search(text, position):
        position = mark.end()
        if mark[0] == markup.opening:
            if len(found) == MAX_CALLS:
                found.append(Malformed(reason=TOO_MANY))
                break
            call, position = _read(text, position, call_id_of(len(found)), markup)
            found.append(call)
        elif mark[0] == "<think>":
            thought = True
            position = end_of_thinking(text, position)
        elif not thought:
            thought = True
            found.clear()
    return tuple(found)


def end_of_thinking(text: str, position: int) -> int:
    """Where the thinking that was opened before ``position`` ends; the end of the text if it is never closed."""
    end = text.find("</think>", position)
    return len(text) if end < 0 else end + len("</think>")


def _read(text: str, start: int, call_id: str, markup: _Markup) -> tuple[ToolCall | Malformed, int]:
    """The call whose opening tag ends at ``start``, and where to read on."""
    try:
        members, end = strictjson.members(text, strictjson.after_space(text, start))
    except ValueError as error:
        return markup.fault(f"a tool call cannot be read: {error}"), start
    end = strictjson.after_space(text, end)
    if not text.startswith(markup.closing, end):
        return markup.fault(f"{markup.closing} is missing after a tool call"), end
    try:
        return _call(members, call_id, markup), end + len(markup.closing)
    except ValueError as error:
        return markup.fault(f"a tool call cannot be understood: {error}"), end + len(markup.closing)


def _call(members: Mapping[str, str], call_id: str, markup: _Markup) -> ToolCall:
    missing = [key for key in ("name", markup.arguments) if key not in members]
    if missing:
        found = ", ".join(map(quoted, members)) or "none"
        raise ValueError(f"it lacks the key {missing[0]!r}, its keys are: {cut(found)}")
    name = strictjson.loads(members["name"])
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"its name is no word of 1 to {MAX_NAME} printable characters but {quoted(members['name'])}")
    parsed_arguments(members[markup.arguments])
    return ToolCall(id=call_id, name=name, arguments=members[markup.arguments])


def call_id_of(index: int) -> str:
    """The id of the reply's call number ``index``."""
    return f"call_{index}"


def quoted(text: str) -> str:
    """A piece of what a model wrote, for a message of one line."""
    return cut(repr(text[:100]))


def cut(text: str) -> str:
    """At most 80 characters of a text."""
    return text if len(text) <= 80 else f"{text[:79]}…"
