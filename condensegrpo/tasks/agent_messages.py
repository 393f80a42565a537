"""Anthropic's Messages, as Claude Code and other agents speak them."""

import json
import secrets
from collections.abc import Iterator, Mapping
from itertools import chain

from condensegrpo.core.messages import Message, Role, ToolCall
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.trajectory import FinishReason
from condensegrpo.tasks.agent_conversation import arguments_of
from condensegrpo.tasks.agent_request import (
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

    def read(self, given: Field, earlier: Earlier) -> ChatRequest:
        """The request. Tools that Anthropic's servers would run are not shown to the policy."""
        del earlier  # every request has its whole conversation
        choice = given["tool_choice"]["type"].value if given["tool_choice"].value else "auto"
        if choice not in ("auto", "any", "none"):
            raise RequestRefused(
                f"tool_choice.type is {choice!r:.80}, and this endpoint takes 'auto', 'any' or 'none'",
                param="tool_choice",
            )
        if given["output_config"].value and given["output_config"]["format"].value is not None:
            raise RequestRefused("output_config.format is given, and this endpoint writes text", param="output_config")
        tools = tuple(filter(None, given["tools"].each(_tool)))
        return ChatRequest(
            dialect=self,
            given=given.mapping(),
            messages=(*_system(given["system"]), *chain.from_iterable(given["messages"].each(_messages))),
            tools=tools,
            calls_tools=bool(tools) and choice != "none",
            stop=given["stop_sequences"].each(Field.text),
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


def _tool(given: Field) -> EnvironmentTool | None:
    """A tool of the client; None: the server would run it."""
    return tool(given, parameters="input_schema") if given["type"].value in (None, "custom") else None


def _system(given: Field) -> tuple[Message, ...]:
    texts = [given.text()] if isinstance(given.value, str) else given.each(lambda block: block.of_kind(TEXTS))
    said = "\n".join(block for block in texts if not block.startswith(BILLING))
    return (Message(role="system", content=said),) if said else ()


def _messages(given: Field) -> list[Message]:
    """A message as the chat of the engine has it: the results in one of the user are messages of their own."""
    said_by, content = given["role"].choice(ROLES), given["content"]
    made, texts, calls = list[Message](), list[str](), list[ToolCall]()
    if isinstance(content.value, str):
        return [Message(role=said_by, content=content.text())]
    for block in content.each(lambda block: block):
        kind = block["type"].value
        if said_by == "assistant" and kind == "tool_use":
            calls.append(call(block["id"], block["name"], block["input"].value))
        elif said_by == "user" and kind == "tool_result":
            made += _said("user", texts)
            result = block["content"].joined(TEXTS)
            made.append(Message(role="tool", content=result, tool_call_id=str(block["tool_use_id"].value)))
        elif said_by != "assistant" or kind not in THOUGHTS:
            texts.append(block.of_kind(TEXTS))
    if said_by == "assistant":
        return [Message(role="assistant", content="\n".join(texts), tool_calls=tuple(calls))]
    return [*made, *_said(said_by, texts)] or [Message(role="user", content="")]


def _said(said_by: Role, texts: list[str]) -> list[Message]:
    """The texts that were collected for a message, which are taken."""
    said = [Message(role=said_by, content="\n".join(texts))] if texts else []
    texts.clear()
    return said
