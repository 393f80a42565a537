"""Chat messages as the logs of other libraries hold them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import AliasChoices, AliasPath, BeforeValidator, Field

from condensegrpo.core.messages import Message, Role, ToolCall

ROLES = {"developer": "system", "function": "tool", **{role: role for role in get_args(Role)}}
ATTACHMENT = "attachment://"  # begins what Inspect writes in place of a long text


NAME = AliasChoices(AliasPath("function", "name"), "name", "function")  # of a call: OpenAI, verifiers, Inspect
ARGUMENTS = AliasChoices(AliasPath("function", "arguments"), "arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCall:
    """A tool call."""

    id: str | None = None
    name: Annotated[str, Field(validation_alias=NAME)] = ""
    arguments: Annotated[str | dict[str, Any], Field(validation_alias=ARGUMENTS)] = ""

    @property
    def call(self) -> ToolCall:
        """The call as the trajectory has it."""
        given = self.arguments
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return ToolCall(id=self.id or "", name=self.name, arguments=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedPart:
    """A part of a message."""

    type: str
    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedError:
    """What went wrong."""

    message: str = ""
    type: str = ""


def _parsed(call: object) -> object:
    """A call that is stored as a text of JSON."""
    return json.loads(call) if isinstance(call, str) else call


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedMessage:
    """A chat message."""

    role: str
    content: str | tuple[LoggedPart, ...] | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[Annotated[LoggedCall | None, BeforeValidator(_parsed)], ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function: str | None = None  # Inspect: the tool that answers
    error: LoggedError | None = None  # Inspect: of a tool


Texts = str | tuple[LoggedMessage, ...]  # a text, or chat messages


def messages(logged: Texts, role: Role, attachments: Mapping[str, str] | None = None) -> tuple[Message, ...]:
    """The messages of a log; a text by itself is a message of ``role``."""
    if isinstance(logged, str):
        return (Message(role=role, content=logged),)
    return tuple(_message(each, attachments or {}) for each in logged)


def _message(logged: LoggedMessage, attachments: Mapping[str, str]) -> Message:
    calls = tuple(call.call for call in logged.tool_calls or () if call is not None)
    role: Any = ROLES.get(logged.role, "user")
    failed = f"Error: {logged.error.message}" if logged.error is not None else ""
    thought = f"<think>{logged.reasoning_content}</think>" if logged.reasoning_content else ""
    written = (f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>' for call in calls)
    content = _content(logged.content, attachments)
    return Message(
        role=role,
        content="\n".join(part for part in (failed, thought, content, *written) if part),
        tool_calls=calls,
        tool_call_id=logged.tool_call_id,
        name=logged.name or (logged.function if role == "tool" else None),
    )


def _content(logged: str | tuple[LoggedPart, ...] | None, attachments: Mapping[str, str]) -> str:
    """The text of a message: a text, or parts with text, reasoning or something else."""
    if logged is None or isinstance(logged, str):
        return attachments.get((logged or "").removeprefix(ATTACHMENT), logged or "")
    return "\n".join(_part(part, attachments) for part in logged)


def _part(part: LoggedPart, attachments: Mapping[str, str]) -> str:
    if part.type == "reasoning":
        return f"<think>{part.reasoning}</think>"
    return _content(part.text, attachments) if part.type == "text" else f"[{part.type}]"
