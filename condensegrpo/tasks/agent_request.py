"""Reads requests of OpenAI's chat completions, and refuses by name what a policy in training cannot do.

The sampling is the run's: ``temperature``, ``top_p``, ``max_tokens``, ``seed``, ``model`` and unknown fields have no
effect. What would change the reply otherwise, such as ``n: 2``, is refused.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from condensegrpo.core.messages import Message, ToolCall, encodable
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.trajectory import FinishReason

T = TypeVar("T")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
ACCEPTED: Mapping[str, tuple[object, ...]] = {  # the values of fields that would change the reply, besides null
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none", "required"),  # required: asked for in vain, as of any model that is not forced
    "modalities": (["text"],),
    "logit_bias": ({},),
    "functions": (),
    "function_call": (),
    "audio": (),
    "prediction": (),
}


class RequestRefused(Exception):
    """A request that cannot be answered."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param  # the field
        self.status = status  # of HTTP


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """A reply as the client gets it."""

    message: Message
    finish: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatRequest:
    """A request, and the reply that it waits for."""

    messages: tuple[Message, ...]  # ids of calls are those of the client
    tools: tuple[EnvironmentTool, ...]  # () none
    calls_tools: bool  # whether calls in the reply are returned as calls
    stop: tuple[str, ...]
    model: str
    stream: bool
    stream_usage: bool
    reply: asyncio.Future[ChatReply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def read_request(body: str) -> ChatRequest:
    """The request of a body."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestRefused("the body is no JSON object")
    for name, accepted in ACCEPTED.items():
        value = given.get(name)
        if value is not None and (value not in accepted or isinstance(value, bool) != isinstance(accepted[0], bool)):
            values = " or ".join(json.dumps(each) for each in accepted) or "nothing"
            raise RequestRefused(f"{name} is {json.dumps(value):.80}, and this endpoint takes {values}", param=name)
    tools = _each(given.get("tools"), "tools", _tool)
    stop = given.get("stop")
    stops = [stop] if isinstance(stop, str) else _list(stop, "stop")
    options = given.get("stream_options")
    messages = _each(given.get("messages"), "messages", _message)
    if not messages:
        raise RequestRefused("messages is empty, wanted at least one", param="messages")
    return ChatRequest(
        messages=messages,
        tools=tools,
        calls_tools=bool(tools) and given.get("tool_choice") != "none",
        stop=tuple(_text(each, "stop") for each in stops if each),
        model=str(given.get("model") or ""),
        stream=given.get("stream") is True,
        stream_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _message(given: object, where: str) -> Message:
    fields = _mapping(given, where)
    role = ROLES.get(str(fields.get("role")))
    if role is None:
        raise RequestRefused(
            f"{where}.role is {fields.get('role')!r:.80}, known: {', '.join(ROLES)}", param=f"{where}.role"
        )
    calls = _each(fields.get("tool_calls"), f"{where}.tool_calls", _call)
    call_id = fields.get("tool_call_id") if role == "tool" else None
    return Message(
        role=role,  # type: ignore[arg-type]  # one of ROLES
        content=_content(fields.get("content"), f"{where}.content"),
        tool_calls=calls if role == "assistant" else (),
        tool_call_id=None if call_id is None else str(call_id),
    )


def _content(given: object, where: str) -> str:
    """The text of a message: a text, or parts of type text."""
    if isinstance(given, str):
        return _text(given, where)
    texts = list[str]()
    for part in _list(given, where):
        fields = _mapping(part, where)
        if fields.get("type") not in ("text", "input_text", "refusal"):
            raise RequestRefused(f"{where} has a part of type {fields.get('type')!r:.80}, wanted text", param=where)
        texts.append(_text(fields.get("text", fields.get("refusal")), where))
    return "\n".join(texts)


def _call(given: object, where: str) -> ToolCall:
    fields = _mapping(given, where)
    function = _mapping(fields.get("function"), where)
    arguments = function.get("arguments") or "{}"
    return ToolCall(
        id=_text(fields.get("id"), f"{where}.id"),
        name=_text(function.get("name"), f"{where}.name"),
        arguments=_text(arguments if isinstance(arguments, str) else json.dumps(arguments), where),
    )


def _tool(given: object, where: str) -> EnvironmentTool:
    fields = _mapping(given, where)
    if fields.get("type", "function") != "function":
        raise RequestRefused(f"{where}.type is {fields['type']!r:.80}, wanted 'function'", param=where)
    function = _mapping(fields.get("function"), where)
    parameters = _mapping(function.get("parameters") or {"type": "object", "properties": {}}, f"{where}.parameters")
    _mapping(parameters.get("properties") or {}, f"{where}.parameters.properties")
    _list(parameters.get("required"), f"{where}.parameters.required")
    return EnvironmentTool(
        name=_text(function.get("name"), f"{where}.name"),
        description=str(function.get("description") or ""),
        parameters=parameters,
    )


def _each(given: object, where: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
    return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(_list(given, where)))


def _list(given: object, where: str) -> list[object]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise RequestRefused(f"{where} is {given!r:.80}, wanted a list", param=where)
    return given


def _mapping(given: object, where: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise RequestRefused(f"{where} is {given!r:.80}, wanted an object", param=where)
    return given


def _text(given: object, where: str) -> str:
    if not isinstance(given, str):
        raise RequestRefused(f"{where} is {given!r:.80}, wanted a text", param=where)
    return encodable(given)
