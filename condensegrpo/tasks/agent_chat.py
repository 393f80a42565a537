"""OpenAI's chat completions, as agents speak them."""

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from condensegrpo.core.messages import Message, Role, ToolCall
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.trajectory import FinishReason
from condensegrpo.tasks.agent_request import (
    TOOL_CHOICES,
    ChatReply,
    ChatRequest,
    Dialect,
    Earlier,
    Json,
    RequestRefused,
    as_list,
    call,
    each,
    joined_text,
    mapping,
    role,
    server_sent,
    text,
    tool,
)

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
TEXTS = {"text": "text", "input_text": "text", "refusal": "refusal"}

ACCEPTED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": TOOL_CHOICES,
    "modalities": (["text"],),
    "logit_bias": ({},),
    "functions": (),
    "function_call": (),
    "audio": (),
    "prediction": (),
}


class ChatCompletions(Dialect):
    """``POST /v1/chat/completions``."""

    path = "/v1/chat/completions"
    accepted = ACCEPTED

    def read(self, given: Mapping[str, Any], earlier: Earlier) -> ChatRequest:
        """The request."""
        del earlier  # every request has its whole conversation
        tools = each(given.get("tools"), "tools", _tool)
        stop = given.get("stop")
        stops = [stop] if isinstance(stop, str) else as_list(stop, "stop")
        return ChatRequest(
            dialect=self,
            given=given,
            messages=each(given.get("messages"), "messages", chat_message),
            tools=tools,
            calls_tools=bool(tools) and given.get("tool_choice") != "none",
            stop=tuple(text(string, "stop") for string in stops if string),
        )

    def written(self, request: ChatRequest, reply: ChatReply) -> Json:
        """The completion."""
        calls = [
            {"id": made.id, "type": "function", "function": {"name": made.name, "arguments": made.arguments}}
            for made in reply.message.tool_calls
        ]
        message = {"role": "assistant", "content": reply.message.text or (None if calls else "")}
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [
                {
                    "index": 0,
                    "message": {**message, "tool_calls": calls} if calls else message,
                    "finish_reason": "tool_calls" if calls and reply.finish is FinishReason.STOP else str(reply.finish),
                    "logprobs": None,
                }
            ],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        }

    def events(self, request: ChatRequest, whole: Json) -> Iterator[str]:
        """Chunks: the whole message at once, then why it ended."""
        head = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        (choice,) = whole["choices"]
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **made} for index, made in enumerate(calls)]
        for part, reason in ((delta, None), ({}, choice["finish_reason"])):
            yield server_sent({**head, "choices": [{"index": 0, "delta": part, "finish_reason": reason}]})
        options = request.given.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage") is True:
            yield server_sent({**head, "choices": [], "usage": whole["usage"]})
        yield "data: [DONE]\n\n"


def chat_message(given: object, where: str) -> Message:
    """A message of the chat format, which data sets hold too; RequestRefused says what is wrong with it."""
    fields = mapping(given, where)
    said_by = role(fields, where, ROLES)
    calls = each(fields.get("tool_calls"), f"{where}.tool_calls", _call)
    call_id = fields.get("tool_call_id") if said_by == "tool" else None
    return Message(
        role=said_by,
        content=joined_text(fields.get("content"), f"{where}.content", TEXTS),
        tool_calls=calls if said_by == "assistant" else (),
        tool_call_id=None if call_id is None else str(call_id),
    )


def _call(given: object, where: str) -> ToolCall:
    fields = mapping(given, where)
    function = mapping(fields.get("function", fields), where)  # verifiers has its fields beside the id
    return call(fields.get("id"), function.get("name"), function.get("arguments"), where)


def _tool(given: object, where: str) -> EnvironmentTool:
    fields = mapping(given, where)
    if fields.get("type", "function") != "function":
        raise RequestRefused(f"{where}.type is {fields['type']!r:.80}, wanted 'function'", param=where)
    return tool(mapping(fields.get("function"), where), where)
