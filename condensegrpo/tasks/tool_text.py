"""How a tool call and its result are written, for demonstrations and the prompts that explain it.

The rollout reads and writes the same two formats (``condensegrpo.rollout.toolcalls``); a test holds this file to it.

    tagged   <tool>{"name": "calculator", "args": {"expression": "48/2"}}</tool>            ─▶ user: <result>24</result>
    native   <tool_call>{"name": "calculator", "arguments": {"expression": "48/2"}}</tool_call>  ─▶ tool: 24
"""

import json
import re
from collections.abc import Mapping
from typing import Literal

from condensegrpo.core.messages import Message
from condensegrpo.tasks.answers import read_answer

ToolFormat = Literal["native", "tagged"]

_TAGS = {"native": "tool_call", "tagged": "tool"}
_ARGUMENTS = {"native": "arguments", "tagged": "args"}


def call_text(tool_format: ToolFormat, name: str, arguments: Mapping[str, object]) -> str:
    """A call as the model is to write it."""
    tag = _TAGS[tool_format]
    call = json.dumps({"name": name, _ARGUMENTS[tool_format]: dict(arguments)}, ensure_ascii=False)
    return f"<{tag}>{call}</{tag}>"


def result_message(tool_format: ToolFormat, name: str, call_id: str, text: str) -> Message:
    """A result as the tool's caller gets it."""
    if tool_format == "native":
        return Message(role="tool", content=text, tool_call_id=call_id, name=name)
    return Message(role="user", content=f"<result>{text}</result>", tool_call_id=call_id, name=name)


def calls_in(tool_format: ToolFormat, text: str) -> tuple[tuple[str, Mapping[str, object]] | None, ...]:
    """Every call that a reply attempts: its name and arguments, or ``None`` for one that cannot be parsed."""
    tag = _TAGS[tool_format]
    pieces = text.split(f"<{tag}>")[1:]
    bodies = [re.fullmatch(rf"(.*?)</{tag}>.*", piece, re.DOTALL) for piece in pieces]
    return tuple(_parse(tool_format, body[1]) if body else None for body in bodies)


def is_call_or_answer(tool_format: ToolFormat, reply: str, *, tool: str, argument: str) -> bool:
    """Whether a reply is well formed: one call of the tool with that one argument, a text, or one answer."""
    calls = calls_in(tool_format, reply)
    if not calls:
        return read_answer(reply) is not None
    if len(calls) > 1 or calls[0] is None or "<answer>" in reply:
        return False
    name, arguments = calls[0]
    return name == tool and set(arguments) == {argument} and isinstance(arguments[argument], str)


def _parse(tool_format: ToolFormat, body: str) -> tuple[str, Mapping[str, object]] | None:
    try:
        call = json.loads(body)
        name, arguments = call["name"], call[_ARGUMENTS[tool_format]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
