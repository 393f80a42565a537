"""How tool calls stand in a reply: the built-in formats, and what every format offers.

A format never raises for what a model writes: a call that cannot be read is a ``Malformed`` with the reason. Calls
inside ``<think>…</think>`` do not count.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.episodes import strictjson

MAX_CALLS = 32  # read from one reply; a model in a loop writes thousands
MAX_NAME = 64  # characters of a tool's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A tool call that could not be read."""

    reason: str  # one line


class ToolFormat:
    """How calls stand in a reply, and how results stand in the conversation."""

    opening: str = ""  # the markup that opens a call
    stop_strings: tuple[str, ...] = ()  # what ends a reply in this format beside the stop ids
    only_tool: str = ""  # the one tool that is called, of a format whose calls name none

    def parse(self, text: str) -> tuple[ToolCall | Malformed, ...]:
        """All calls of a reply in order, at most ``MAX_CALLS`` and one fault for the rest. Never raises."""
        raise NotImplementedError

    def result(self, call_id: str, name: str, text: str) -> Message:
        """The message that shows a result; ``name`` is empty when the call could not be read."""
        raise NotImplementedError

    def instructions(self, schemas: Sequence[Mapping[str, object]]) -> str:
        """The text that the system message needs; empty where the chat template does so itself."""
        return ""


def check_format(form: ToolFormat) -> None:
    """Try the members of a format on made-up values; raises TypeError for what is not as ``ToolFormat`` says."""
    calls, shown = form.parse("1 + 1"), form.result("call_0", "look", "2")
    tool = EnvironmentTool(name="look", description="Looks.", parameters={"type": "object", "properties": {}})
    instructions = form.instructions([tool.schema])
    stops = form.stop_strings
    text_shown = isinstance(shown, Message) and isinstance(shown.content, str) and shown.role in ("tool", "user")
    texts = isinstance(stops, tuple | list) and all(isinstance(stop, str) and stop != "" for stop in stops)
    read = isinstance(calls, tuple | list) and all(isinstance(call, ToolCall | Malformed) for call in calls)
    for member, returned, right, wanted in (
        ("opening", form.opening, isinstance(form.opening, str), "a text"),
        ("stop_strings", stops, texts, "a tuple of texts"),
        ("parse()", calls, read, "ToolCalls or Malformed"),
        ("result()", shown, text_shown, "a Message of role tool or user, with a text"),
        ("instructions()", instructions, isinstance(instructions, str), "a text"),
    ):
        if not right:
            raise TypeError(f"{member} is {returned!r:.80}, wanted {wanted}")


class _JsonCalls(ToolFormat):
    """Calls as JSON between two tags: an object with a name and, under another key, the arguments."""

    closing: str
    arguments: str  # the key of the arguments
    result_form: str = ""  # the words of the instructions that say how a result is shown
    none_beside_answer: bool = False  # see ``parsed_calls``

    @property
    def form(self) -> str:
        """A call, with dots for what differs."""
        return f'{self.opening}{{"name": "…", "{self.arguments}": {{…}}}}{self.closing}'

    def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """A call as a model is to write it."""
        content = json.dumps({"name": name, self.arguments: dict(arguments)}, ensure_ascii=False)
        return f"{self.opening}{content}{self.closing}"

    def parse(self, text: str) -> tuple[ToolCall | Malformed, ...]:
        """All calls of a reply in order."""
        if self.opening not in text:
            return ()
        return parsed_calls(text, re.escape(self.opening), self._read, none_beside_answer=self.none_beside_answer)

    def _read(self, text: str, start: int, opening: str, call_id: str) -> tuple[ToolCall | Malformed, int]:
        try:
            members, end = strictjson.members(text, strictjson.after_space(text, start))
        except ValueError as error:
            return self._malformed(f"a tool call cannot be read: {error}"), start
        end = strictjson.after_space(text, end)
        if not text.startswith(self.closing, end):
            return self._malformed(f"{self.closing} is missing after a tool call"), end
        try:
            return self._call(members, call_id), end + len(self.closing)
        except ValueError as error:
            return self._malformed(f"a tool call cannot be understood: {error}"), end + len(self.closing)

    def _call(self, members: Mapping[str, str], call_id: str) -> ToolCall:
        missing = [key for key in ("name", self.arguments) if key not in members]
        if missing:
            keys = ", ".join(map(quoted, members)) or "none"
            raise ValueError(f"it lacks the key {missing[0]!r}, its keys are: {one_line_at_most(keys)}")
        name = checked_name(strictjson.loads(members["name"]), members["name"])
        parsed_arguments(members[self.arguments])
        return ToolCall(id=call_id, name=name, arguments=members[self.arguments])

    def _malformed(self, reason: str) -> Malformed:
        return Malformed(reason=f"{reason}; a call is written {self.form}")

    def description(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """The text of a system message on tools that the chat template does not show."""
        keys = ("name", "description", "parameters")  # without the wrapper and the type of the result
        described = ({key: schema["function"][key] for key in keys} for schema in schemas)
        shown = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in described)
        return (
            f"You can use tools. To call one, write {self.form} and stop there; its result follows{self.result_form}. "
            f"The tools, with the schema of their {self.arguments}:\n{shown}"
        )


class Native(_JsonCalls):
    """The format of Hermes, Qwen and most chat templates: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

    The renderer shows the schemas, by the chat template or else by ``description``.
    """

    opening, closing, arguments = "<tool_call>", "</tool_call>", "arguments"

    def result(self, call_id: str, name: str, text: str) -> Message:
        """A message of role ``tool``."""
        return Message(role="tool", content=text, tool_call_id=call_id, name=name or None)


class Tagged(_JsonCalls):
    """A format for models without a tool template: ``<tool>{"name": …, "args": {…}}</tool>``, results by the user."""

    opening, closing, arguments = "<tool>", "</tool>", "args"
    stop_strings = ("</tool>", "</answer>")
    result_form = " in <result>…</result>"
    none_beside_answer = True  # an answer ends the episode

    def result(self, call_id: str, name: str, text: str) -> Message:
        """A user message with the result in ``<result>`` tags."""
        return Message(role="user", content=f"<result>{text}</result>", tool_call_id=call_id, name=name or None)

    def instructions(self, schemas: Sequence[Mapping[str, object]]) -> str:
        """The tools by schema, and how to call one; nothing without tools."""
        return self.description(schemas) if schemas else ""


JSON_FORMATS: Mapping[str, Native | Tagged] = MappingProxyType({"native": Native(), "tagged": Tagged()})


def with_instructions(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """The messages with a text at the end of the first system message; they get one if there is none."""
    first = next((index for index, message in enumerate(messages) if message.role == "system"), None)
    if first is None:
        return (Message(role="system", content=text), *messages)
    system = messages[first].followed_by(f"\n\n{text}" if messages[first].text else text)
    return (*messages[:first], system, *messages[first + 1 :])


def parsed_calls(
    text: str,
    opening: str,
    read: Callable[[str, int, str, str], tuple[ToolCall | Malformed, int]],
    *,
    none_beside_answer: bool = False,
) -> tuple[ToolCall | Malformed, ...]:
    """All calls of a text outside of its thinking, at most ``MAX_CALLS`` and one fault for the rest.

    A ``</think>`` that nothing opened ends the thinking that a template's generation prompt opened: calls before it do
    not count.

    Args:
        opening: regular expression of what opens a call.
        read: the call after an opening, and the position after it; called with the text, the position after the
            opening, the opening and the id of the call.
        none_beside_answer: a reply with ``<answer>…</answer>`` outside of its calls has none.
    """
    answer = "|<answer>" if none_beside_answer else ""
    marks = re.compile(f"{opening}|<think>|</think>{answer}", re.MULTILINE)
    calls: list[ToolCall | Malformed] = []
    thought = False
    position, closed = 0, text.rfind("</answer>")
    while mark := marks.search(text, position):
        position = mark.end()
        if mark[0] == "<think>":
            thought = True
            end = text.find("</think>", position)
            position = len(text) if end < 0 else end + len("</think>")
        elif mark[0] == "</think>":
            if not thought:
                calls.clear()
            thought = True
        elif mark[0] == "<answer>":
            if position <= closed:
                return ()
        elif len(calls) == MAX_CALLS:
            calls.append(Malformed(reason=f"a reply may hold {MAX_CALLS} tool calls, the rest was not run"))
            break
        else:
            call, position = read(text, position, mark[0], call_id_of(len(calls)))
            calls.append(call)
    return tuple(calls)


def parsed_arguments(raw: str) -> dict[str, object]:
    """The arguments of a call, from the JSON that the model wrote: an object, or an object inside a JSON string."""
    value = strictjson.loads(raw)
    if isinstance(value, str):
        value = strictjson.loads(value)
    if not isinstance(value, dict):
        raise ValueError(f"the arguments are no JSON object but {quoted(raw)}")
    return value


def checked_name(name: object, written: object = "") -> str:
    """The name of a called tool."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        shown = written if isinstance(written, str) and written else repr(name)
        raise ValueError(f"its name is no word of 1 to {MAX_NAME} printable characters but {quoted(shown)}")
    return name


def call_id_of(index: int) -> str:
    """The id of the reply's call number ``index``."""
    return f"call_{index}"


def quoted(text: str) -> str:
    """A piece of what a model wrote, for a message of one line."""
    return one_line_at_most(repr(text[:100]))


def one_line_at_most(text: str) -> str:
    """At most 80 characters of a text."""
    return text if len(text) <= 80 else f"{text[:79]}…"


CODE_TOOL = "python"  # the one tool that the format ``code`` calls
_FENCE = "```"
_OPENING = r"<code>|<python>|^[ \t]*```(?:python|py)[ \t\r]*$"
_FENCED = re.compile(r"\s*```(?:python|py)?[ \t\r]*\n(.*?)\s*```\s*", re.DOTALL)  # a fence inside of tags
_CLOSED_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)


class Code(ToolFormat):
    """Calls of the tool ``python`` as code, for models that write code and know no tool template.

        <code>print(48 / 2)</code>    <python>print(48 / 2)</python>    ```python⏎print(48 / 2)⏎```  ─▶  python(code=…)
        user: <output>24.0</output>

    An answer ends the episode: code in a reply that holds ``<answer>…</answer>`` outside of its code is not run.
    """

    opening, only_tool, stop_strings = "<code>", CODE_TOOL, ("</code>", "</python>", "</answer>")

    def parse(self, text: str) -> tuple[ToolCall | Malformed, ...]:
        """All pieces of code of a reply in order; none if the reply gives an answer."""
        return parsed_calls(text, _OPENING, _read, none_beside_answer=True)

    def result(self, call_id: str, name: str, text: str) -> Message:
        """A user message with the output in ``<output>`` tags."""
        return Message(role="user", content=f"<output>{text}</output>", tool_call_id=call_id, name=name or None)

    def instructions(self, schemas: Sequence[Mapping[str, object]]) -> str:
        """The text that says how code is run; empty without tools."""
        if not schemas:
            return ""
        return (
            "You can run Python. Write <code>…</code> and stop there; what the code prints follows in "
            "<output>…</output>. Nothing is kept between two pieces of code, so print what you need."
        )


def _read(text: str, start: int, opening: str, call_id: str) -> tuple[ToolCall | Malformed, int]:
    """The code that begins at ``start``, and where to read on."""
    fenced = opening.lstrip().startswith(_FENCE)
    closing = _FENCE if fenced else f"</{opening[1:]}"
    end = _CLOSED_FENCE.search(text, start) if fenced else re.compile(re.escape(closing)).search(text, start)
    if end is None:
        return Malformed(reason=f"{closing} is missing after a piece of code; write {_shown(opening)}"), len(text)
    code = text[start : end.start()]
    inner = _FENCED.fullmatch(code)
    code = inner[1] if inner else code
    if not code.strip():
        return Malformed(reason=f"a piece of code is empty; write {_shown(opening)}"), end.end()
    return ToolCall(id=call_id, name=CODE_TOOL, arguments=json.dumps({"code": code.strip("\r\n")})), end.end()


def _shown(opening: str) -> str:
    return "```python … ```" if opening.lstrip().startswith(_FENCE) else f"{opening} … </{opening[1:]}"


BUILT_IN_FORMATS: tuple[ToolFormat, ...] = (*JSON_FORMATS.values(), Code())  # whose calls stand in the text of a reply


def transcript(message: Message) -> str:
    """A message as text: its reasoning, what it says, and the calls that are not in what it says.

    Families of models whose calls are control tokens keep them beside the text; in a format of texts they are in it:

        "I look.", look(key="a")                    ─▶  I look.⏎<tool_call>{"name": "look", "arguments": {"key": "a"}}…
        "<code>1 + 1</code>", python(code="1 + 1")  ─▶  <code>1 + 1</code>
    """
    said, thought = message.text, f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    beside = [call for call in message.tool_calls if not _names(said, call)]
    read = ([call for call in form.parse(said) if isinstance(call, ToolCall)] for form in BUILT_IN_FORMATS)
    if beside and [*message.tool_calls] in read:
        beside = []
    calls = (f'\n<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>' for call in beside)
    return f"{thought}{said}{''.join(calls)}"


def _names(text: str, call: ToolCall) -> bool:
    """Whether a text has the name of a call and the texts among its arguments, as in a format of someone else."""
    try:
        values = [*parsed_arguments(call.arguments).values()]
    except ValueError:
        values = [call.arguments]
    return all(each in text for each in (call.name, *values) if isinstance(each, str))
