"""OpenAI's Responses, as Codex and other agents speak them."""

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from condensegrpo.core.messages import Message, Role
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.trajectory import FinishReason
from condensegrpo.tasks.agent_conversation import arguments_of
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

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ACCEPTED: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "tool_choice": TOOL_CHOICES,
}
# items with text: the field of its parts, what their events are called, and what the events of texts have besides
STREAMED: Mapping[str, tuple[str, str, str, Json]] = {
    "message": ("content", "content_part", "output_text", {"logprobs": []}),
    "reasoning": ("summary", "reasoning_summary_part", "reasoning_summary_text", {}),
}
KEPT = 1000  # conversations of a client that may be named
ONE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class Responses(Dialect):
    """``POST /v1/responses``."""

    path = "/v1/responses"
    accepted = ACCEPTED

    def read(self, given: Field, earlier: Earlier) -> ChatRequest:
        """The request. Tools that OpenAI's servers would run are not shown to the policy."""
        form = given["text"]["format"] if given["text"].value else given["text"]
        if form.value and form["type"].value != "text":
            raise RequestRefused(
                f"text.format.type is {form['type'].value!r:.80}, and this endpoint takes 'text'", param="text"
            )
        tools, instructions = tuple(filter(None, given["tools"].each(_tool))), given["instructions"]
        system = (Message(role="system", content=instructions.text()),) if instructions.value else ()
        return ChatRequest(
            dialect=self,
            given=given.mapping(),
            messages=(
                *system,
                *_continued(given["previous_response_id"].value, earlier),
                *_messages(given["input"]),
            ),
            tools=tools,
            calls_tools=bool(tools) and given["tool_choice"].value != "none",
            earlier=earlier,
        )

    def written(self, request: ChatRequest, reply: ChatReply) -> Json:
        """The response, which ``previous_response_id`` of a later request may name if it is stored."""
        said, given = reply.message, request.given
        whole, name = reply.finish is FinishReason.STOP, f"resp_{secrets.token_hex(12)}"
        status = "completed" if whole else "incomplete"
        output = list[Json]()
        if said.reasoning:
            summary = [{"type": "summary_text", "text": said.reasoning}]
            output.append({"type": "reasoning", "id": f"rs_{secrets.token_hex(8)}", "summary": summary})
        if said.text or not said.tool_calls:
            content = [{"type": "output_text", "text": said.text, "annotations": [], "logprobs": []}]
            about = {"id": f"msg_{secrets.token_hex(8)}", "role": "assistant", "status": status}
            output.append({"type": "message", **about, "content": content})
        custom = {entry.get("name") for entry in given.get("tools") or () if entry.get("type") == "custom"}
        for made in said.tool_calls:
            about = {"call_id": made.id, "name": made.name, "status": "completed"}
            if made.name in custom:
                item = {
                    "type": "custom_tool_call",
                    "id": f"ctc_{secrets.token_hex(8)}",
                    "input": str(arguments_of(made).get("input", made.arguments)),
                }
            else:
                item = {"type": "function_call", "id": f"fc_{secrets.token_hex(8)}", "arguments": made.arguments}
            output.append({**item, **about})
        if given.get("store") is not False:
            first = 1 if given.get("instructions") else 0  # those of one request are not of the next
            if len(request.earlier) >= KEPT:
                del request.earlier[next(iter(request.earlier))]
            request.earlier[name] = (*request.messages[first:], said)
        return {
            "id": name,
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "model": request.model,
            "output": output,
            "usage": {
                "input_tokens": 0,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 0,
            },
            "instructions": given.get("instructions"),
            "metadata": given.get("metadata") or {},
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "previous_response_id": given.get("previous_response_id"),
            "temperature": given.get("temperature"),
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": given.get("tools") or [],
            "top_p": given.get("top_p"),
        }

    def events(self, request: ChatRequest, whole: Json) -> Iterator[str]:
        """The response without output, its items, then the whole."""
        begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        made: list[tuple[str, Json]] = [
            (f"response.{kind}", {"response": begun}) for kind in ("created", "in_progress")
        ]
        for index, item in enumerate(whole["output"]):
            made += _item_events(index, item)
        made.append((f"response.{whole['status']}", {"response": whole}))
        for number, (kind, fields) in enumerate(made):
            yield server_sent({"type": kind, "sequence_number": number, **fields})


def _item_events(index: int, item: Json) -> Iterator[tuple[str, Json]]:
    """The events of one item of the output: its beginning, its text at once, its end."""
    at = {"output_index": index, "item_id": item["id"]}
    if item["type"] in STREAMED:
        parts, kind, text_kind, more = STREAMED[item["type"]]
        empty, (part,) = {**item, parts: []}, item[parts]
        where, said = {**at, f"{parts}_index": 0}, part["text"]
        inner = [
            (f"response.{kind}.added", {**where, "part": {**part, "text": ""}}),
            (f"response.{text_kind}.delta", {**where, "delta": said, **more}),
            (f"response.{text_kind}.done", {**where, "text": said, **more}),
            (f"response.{kind}.done", {**where, "part": part}),
        ]
    else:
        field = "arguments" if item["type"] == "function_call" else "input"
        kind = "function_call_arguments" if item["type"] == "function_call" else "custom_tool_call_input"
        empty = {**item, field: ""}
        done = {**at, field: item[field], "name": item["name"]}
        inner = [(f"response.{kind}.delta", {**at, "delta": item[field]}), (f"response.{kind}.done", done)]
    begun = empty if item["type"] == "reasoning" else {**empty, "status": "in_progress"}
    yield "response.output_item.added", {"output_index": index, "item": begun}
    yield from inner
    yield "response.output_item.done", {"output_index": index, "item": item}


def _tool(given: Field) -> EnvironmentTool | None:
    """A function, or a tool of one free text; None: the server would run it."""
    if given["type"].value == "custom":
        return replace(tool(given), parameters=ONE_TEXT)
    return tool(given) if given["type"].value == "function" else None


def _continued(name: object, earlier: Earlier) -> tuple[Message, ...]:
    """The messages of a conversation that a request continues by its id."""
    if name is None:
        return ()
    if str(name) not in earlier:
        raise RequestRefused(
            f"previous_response_id {name!r:.80} is of no response that was stored here",
            param="previous_response_id",
            status=404,
        )
    return earlier[str(name)]


def _messages(given: Field) -> list[Message]:
    """The messages of the input. The items of one reply, its text and its calls, are one message."""
    if isinstance(given.value, str):
        return [Message(role="user", content=given.text())]
    made = list[Message]()
    for item in given.each(lambda item: item):
        kind = item.mapping().get("type", "message")
        if kind == "message":
            made.append(Message(role=item["role"].choice(ROLES), content=item["content"].joined(TEXTS)))
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item["arguments"].value if kind == "function_call" else {"input": item["input"].value}
            new = call(item["call_id"], item["name"], arguments)
            if not made or made[-1].role != "assistant":
                made.append(Message(role="assistant", content=""))
            made[-1] = replace(made[-1], tool_calls=(*made[-1].tool_calls, new))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            result = item["output"].joined(TEXTS)
            made.append(Message(role="tool", content=result, tool_call_id=str(item["call_id"].value)))
        elif kind != "reasoning":  # the sampled reply has its thoughts
            raise RequestRefused(
                f"{item.place}.type is {kind!r:.80}, and this endpoint knows messages, reasoning, function and custom "
                f"calls and their output",
                param=item.place,
            )
    return made
