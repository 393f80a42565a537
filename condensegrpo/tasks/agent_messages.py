"""Anthropic's Messages, as Claude Code and other agents speak them."""

import json
import secrets
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from condensegrpo.core.messages import Message, Role, ToolCall
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.trajectory import FinishReason
from condensegrpo.tasks.agent_conversation import arguments_of
from condensegrpo.tasks.agent_request import (
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

TEXTS = {"text": "text"}
ACCEPTED: Mapping[str, tuple[object, ...]] = {"container": (), "mcp_servers": ([],), "output_format": ()}
ROLES: Mapping[str, Role] = {"user": "user", "assistant": "assistant", "system": "system"}
BILLING = "x-anthropic-billing-header:"  # begins a system text of Claude Code that differs in every request
THOUGHTS = ("thinking", "redacted_thinking")  # blocks; the sampled reply has them
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class Messages(Dialect):
    """``POST /v1/messages``."""

    path = "/v1/messages"
    accepted = ACCEPTED

    def read(self, given: Mapping[str, Any], earlier: Earlier) -> ChatRequest:
        """The request. Tools that Anthropic's servers would run are not shown to the policy."""
        del earlier  # every request has its whole conversation
        choice = mapping(given.get("tool_choice") or {"type": "auto"}, "tool_choice")
        if choice.get("type") not in ("auto", "any", "none"):
            raise RequestRefused(
                f"tool_choice.type is {choice.get('type')!r:.80}, and this endpoint takes 'auto', 'any' or 'none'",
                param="tool_choice",
            )
        config = mapping(given.get("output_config") or {}, "output_config")
        if config.get("format") is not None:
            raise RequestRefused("output_config.format is given, and this endpoint writes text", param="output_config")
        tools = tuple(filter(None, each(given.get("tools"), "tools", _tool)))
        messages = chain.from_iterable(each(given.get("messages"), "messages", _messages))
        return ChatRequest(
            dialect=self,
            given=given,
            messages=(*_system(given.get("system")), *messages),
            tools=tools,
            calls_tools=bool(tools) and choice["type"] != "none",
            stop=tuple(
                text(string, "stop_sequences") for string in as_list(given.get("stop_sequences"), "stop_sequences")
            ),
        )

    def written(self, request: ChatRequest, reply: ChatReply) -> Json:
        """The message. Thoughts are a block of it where the request asks for them."""
        said, content = reply.message, list[Json]()
        wanted = request.given.get("thinking")
        if said.reasoning and isinstance(wanted, dict) and wanted.get("type") in ("enabled", "adaptive"):
            content.append({"type": "thinking", "thinking": said.reasoning, "signature": "unsigned"})
        if said.text or not said.tool_calls:
            content.append({"type": "text", "text": said.text})
        content += [
            {"type": "tool_use", "id": made.id, "name": made.name, "input": arguments_of(made)}
            for made in said.tool_calls
        ]
        if reply.finish is not FinishReason.STOP:
            reason = "max_tokens"
        elif said.tool_calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if reply.stop is None else "stop_sequence"
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": reply.stop if reason == "stop_sequence" else None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }

    def events(self, request: ChatRequest, whole: Json) -> Iterator[str]:
        """The message without content, its blocks, then why it ended."""
        ending = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_start", message={**whole, "content": [], **dict.fromkeys(ending)})
        for index, block in enumerate(whole["content"]):
            empty, deltas = _parts(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=ending, usage=whole["usage"])
        yield _event("message_stop")

    def error(self, refused: RequestRefused) -> Json:
        """A refusal in Anthropic's form."""
        kind = ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(refused)}, "request_id": None}


def _event(kind: str, **fields: object) -> str:
    return server_sent({"type": kind, **fields})


def _parts(block: Json) -> tuple[Json, list[Json]]:
    """A block of a stream as it begins, and what is added to it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": "", "signature": ""}, [thought, signed]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def _tool(given: object, where: str) -> EnvironmentTool | None:
    """A tool of the client; None: the server would run it."""
    fields = mapping(given, where)
    return tool(fields, where, parameters="input_schema") if fields.get("type") in (None, "custom") else None


def _system(given: object) -> tuple[Message, ...]:
    blocks = as_list(given, "system") if isinstance(given, list) else [{"type": "text", "text": given or ""}]
    texts = (joined_text([block], "system", TEXTS) for block in blocks)
    said = "\n".join(block for block in texts if not block.startswith(BILLING))
    return (Message(role="system", content=said),) if said else ()


def _messages(given: object, where: str) -> list[Message]:
    """A message as the chat of the engine has it: the results in one of the user are messages of their own."""
    fields = mapping(given, where)
    said_by, content = role(fields, where, ROLES), fields.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else as_list(content, f"{where}.content")
    made, texts, calls = list[Message](), list[str](), list[ToolCall]()
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        each_block = mapping(block, place)
        kind = each_block.get("type")
        if said_by == "assistant" and kind == "tool_use":
            calls.append(call(each_block.get("id"), each_block.get("name"), each_block.get("input"), place))
        elif said_by == "user" and kind == "tool_result":
            made += _said("user", texts)
            result = joined_text(each_block.get("content"), place, TEXTS)
            made.append(Message(role="tool", content=result, tool_call_id=str(each_block.get("tool_use_id"))))
        elif said_by != "assistant" or kind not in THOUGHTS:
            texts.append(joined_text([each_block], place, TEXTS))
    if said_by == "assistant":
        return [Message(role="assistant", content="\n".join(texts), tool_calls=tuple(calls))]
    return [*made, *_said(said_by, texts)] or [Message(role="user", content="")]


def _said(said_by: Role, texts: list[str]) -> list[Message]:
    """The texts that were collected for a message, which are taken."""
    said = [Message(role=said_by, content="\n".join(texts))] if texts else []
    texts.clear()
    return said
