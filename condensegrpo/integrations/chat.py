"""Chat messages as data sets and tasks of other libraries hold them."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import AliasChoices, AliasPath, BeforeValidator, Field

from condensegrpo.core.messages import Message, Role, ToolCall

ROLES = {"developer": "system", "function": "tool", **{role: role for role in get_args(Role)}}
NAME = AliasChoices(AliasPath("function", "name"), "name")  # of a call: OpenAI, verifiers
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


Texts = str | tuple[LoggedMessage, ...]  # a text, or chat messages


def messages(logged: Texts, role: Role) -> tuple[Message, ...]:
    """The messages of a data set; a text by itself is a message of ``role``."""
    return (Message(role=role, content=logged),) if isinstance(logged, str) else tuple(map(_message, logged))


def _message(logged: LoggedMessage) -> Message:
    calls = tuple(call.call for call in logged.tool_calls or () if call is not None)
    role: Any = ROLES.get(logged.role, "user")
    thought = f"<think>{logged.reasoning_content}</think>" if logged.reasoning_content else ""
    content = "\n".join(map(_part, logged.content)) if isinstance(logged.content, tuple) else logged.content
    written = (f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>' for call in calls)
    return Message(
        role=role,
        content="\n".join(part for part in (thought, content, *written) if part),
        tool_calls=calls,
        tool_call_id=logged.tool_call_id,
        name=logged.name,
    )


def _part(part: LoggedPart) -> str:
    if part.type == "reasoning":
        return f"<think>{part.reasoning}</think>"
    return part.text if part.type == "text" else f"[{part.type}]"
