"""What agents ask for, whatever API they speak, and what a policy in training cannot do, which is refused by name.

    body ── Dialect.read ──▶ ChatRequest ──▶ Inbox of the episode ──▶ ChatReply ── Dialect.written ──▶ JSON, or events

The sampling is the run's: ``temperature``, ``top_p``, ``max_tokens``, ``seed``, ``model`` and unknown fields have no
effect. What would change the reply otherwise, such as ``n: 2``, is refused.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from condensegrpo.core.messages import Message, Role, ToolCall, encodable
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.trajectory import FinishReason

T = TypeVar("T")
Json = dict[str, Any]
NO_ARGUMENTS = {"type": "object", "properties": {}}
TOOL_CHOICES = ("auto", "none", "required")  # required: asked for in vain, as of any model that is not forced


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
    stop: str | None = None  # the stop string of the request that ended it


Earlier = dict[str, tuple[Message, ...]]  # the messages of conversations that a client may name, by their id


class Dialect(ABC):
    """An API that agents speak: how its requests are read, and how replies and refusals are written in it."""

    path: ClassVar[str]
    accepted: ClassVar[
        Mapping[str, tuple[object, ...]]
    ]  # the values of fields that would change the reply, besides null

    @abstractmethod
    def read(self, given: Mapping[str, Any], earlier: Earlier) -> "ChatRequest":
        """The request that JSON asks for; ``earlier``: conversations of this client."""

    @abstractmethod
    def written(self, request: "ChatRequest", reply: ChatReply) -> Json:
        """A whole reply. Its usage is 0: the trajectory has the tokens."""

    @abstractmethod
    def events(self, request: "ChatRequest", whole: Json) -> Iterator[str]:
        """A whole reply as server-sent events."""

    def error(self, refused: RequestRefused) -> Json:
        """A refusal, in OpenAI's form."""
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": None}}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatRequest:
    """A request, and the reply that it waits for."""

    dialect: Dialect
    given: Mapping[str, Any]  # the JSON of it
    messages: tuple[Message, ...]  # ids of calls are those of the client
    tools: tuple[EnvironmentTool, ...]  # () none
    calls_tools: bool  # whether calls in the reply are returned as calls
    stop: tuple[str, ...] = ()
    earlier: Earlier = field(default_factory=dict, repr=False)
    reply: asyncio.Future[ChatReply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def model(self) -> str:
        """The model that it names, which has no effect."""
        return str(self.given.get("model") or "policy")

    @property
    def streams(self) -> bool:
        """Whether it wants events."""
        return self.given.get("stream") is True


def read_request(body: str, dialect: Dialect, earlier: Earlier | None = None) -> ChatRequest:
    """The request of a body."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestRefused("the body is no JSON object")
    for name, accepted in dialect.accepted.items():
        value = given.get(name)
        if value is not None and (
            value not in accepted or (bool(accepted) and isinstance(value, bool) != isinstance(accepted[0], bool))
        ):
            values = " or ".join(json.dumps(each) for each in accepted) or "nothing"
            raise RequestRefused(f"{name} is {json.dumps(value):.80}, and this endpoint takes {values}", param=name)
    request = dialect.read(given, {} if earlier is None else earlier)
    if not request.messages:
        raise RequestRefused("there is no message, wanted at least one", param="messages")
    return request


def server_sent(data: Json) -> str:
    """An event of a stream, by the name of its ``type`` if it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"


def joined_text(given: object, where: str, kinds: Mapping[str, str]) -> str:
    """The text of a message: a text, or parts of ``kinds``, which name the field with their text."""
    if isinstance(given, str):
        return text(given, where)
    texts = list[str]()
    for part in as_list(given, where):
        fields = mapping(part, where)
        field_of_text = kinds.get(str(fields.get("type")))
        if field_of_text is None:
            raise RequestRefused(f"{where} has a part of type {fields.get('type')!r:.80}, wanted text", param=where)
        texts.append(text(fields.get(field_of_text), where))
    return "\n".join(texts)


def role(given: Mapping[str, Any], where: str, known: Mapping[str, Role]) -> Role:
    """The role of a message; ``known``: the roles of the API, as a template has them."""
    found = known.get(str(given.get("role")))
    if found is None:
        raise RequestRefused(
            f"{where}.role is {given.get('role')!r:.80}, known: {', '.join(known)}", param=f"{where}.role"
        )
    return found


def tool(given: Mapping[str, Any], where: str, *, parameters: str = "parameters") -> EnvironmentTool:
    """A function that a client declares; ``parameters`` names the field of its schema."""
    schema = mapping(given.get(parameters) or NO_ARGUMENTS, f"{where}.{parameters}")
    mapping(schema.get("properties") or {}, f"{where}.{parameters}.properties")
    as_list(schema.get("required"), f"{where}.{parameters}.required")
    return EnvironmentTool(
        name=text(given.get("name"), f"{where}.name"),
        description=str(given.get("description") or ""),
        parameters=schema,
    )


def call(call_id: object, name: object, arguments: object, where: str) -> ToolCall:
    """A call in a reply; its arguments are JSON or an object."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return ToolCall(
        id=text(call_id, f"{where}.id"), name=text(name, f"{where}.name"), arguments=text(written or "{}", where)
    )


def each(given: object, where: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
    """The items of a list, each read with its place."""
    return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(as_list(given, where)))


def as_list(given: object, where: str) -> list[object]:
    """A list; null is an empty one."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise RequestRefused(f"{where} is {given!r:.80}, wanted a list", param=where)
    return given


def mapping(given: object, where: str) -> Mapping[str, Any]:
    """An object."""
    if not isinstance(given, dict):
        raise RequestRefused(f"{where} is {given!r:.80}, wanted an object", param=where)
    return given


def text(given: object, where: str) -> str:
    """A text that can be tokenised."""
    if not isinstance(given, str):
        raise RequestRefused(f"{where} is {given!r:.80}, wanted a text", param=where)
    return encodable(given)
