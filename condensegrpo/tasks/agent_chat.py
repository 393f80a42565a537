"""OpenAI's chat completions, as agents speak them."""

import secrets
import time
from collections.abc import Iterator, Mapping

from condensegrpo.core.messages import Message, Role, ToolCall
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.trajectory import FinishReason
from condensegrpo.tasks.agent_request import (
    TOOL_CHOICES,
    ChatReply,
    ChatRequest,
    Dialect,
    Earlier,
    Field,
    Json,
    RequestRefused,
    call,
    server_sent,
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

    def read(self, given: Field, earlier: Earlier) -> ChatRequest:
        """The request."""
        del earlier  # every request has its whole conversation
        tools, stop = given["tools"].each(_tool), given["stop"]
        stops = [stop.text()] if isinstance(stop.value, str) else stop.each(_stop_string)
        return ChatRequest(
            dialect=self,
            given=given.mapping(),
            messages=given["messages"].each(chat_message),
            tools=tools,
            calls_tools=bool(tools) and given["tool_choice"].value != "none",
            stop=tuple(filter(None, stops)),
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


def _stop_string(given: Field) -> str:
    """A stop string; empty: none, as null, which some clients send in the list."""
    return "" if given.value is None else given.text()


def chat_message(given: Field) -> Message:
    """A message of the chat format, which data sets hold too; RequestRefused says what is wrong with it."""
    said_by, call_id = given["role"].choice(ROLES), given["tool_call_id"].value
    calls = given["tool_calls"].each(_call)
    return Message(
        role=said_by,
        content=given["content"].joined(TEXTS),
        tool_calls=calls if said_by == "assistant" else (),
        tool_call_id=None if call_id is None or said_by != "tool" else str(call_id),
    )


def _call(given: Field) -> ToolCall:
    function = given["function"] if "function" in given.mapping() else given  # verifiers has its fields beside the id
    return call(given["id"], function["name"], function["arguments"].value)


def _tool(given: Field) -> EnvironmentTool:
    if given.mapping().get("type", "function") != "function":
        raise RequestRefused(f"{given.place}.type is {given['type'].value!r:.80}, wanted 'function'", param=given.place)
    return tool(given["function"])
