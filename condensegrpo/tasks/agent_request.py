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

from condensegrpo.core.messages import Message, ToolCall, encodable
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


@dataclass(frozen=True, slots=True)
class Field:
    """A value in the JSON of a request and its place, such as ``messages[0].content``, which a refusal names."""

    value: Any
    place: str

    def __getitem__(self, name: str) -> "Field":
        """A value of an object; null if it has none of that name."""
        return Field(self.mapping().get(name), f"{self.place}.{name}" if self.place else name)

    def mapping(self) -> Mapping[str, Any]:
        """An object."""
        if not isinstance(self.value, dict):
            raise self.refused("an object")
        return self.value

    def each(self, read: "Callable[[Field], T]") -> tuple[T, ...]:
        """The items of a list, each as it is read; null is an empty list."""
        if not isinstance(self.value, list | None):
            raise self.refused("a list")
        return tuple(read(Field(item, f"{self.place}[{index}]")) for index, item in enumerate(self.value or ()))

    def text(self) -> str:
        """A text that can be tokenised."""
        if not isinstance(self.value, str):
            raise self.refused("a text")
        return encodable(self.value)

    def choice(self, known: Mapping[str, T]) -> T:
        """The value that a text, one of ``known``, stands for."""
        if not isinstance(self.value, str) or self.value not in known:
            raise RequestRefused(f"{self.place} is {self.value!r:.80}, known: {', '.join(known)}", param=self.place)
        return known[self.value]

    def joined(self, kinds: Mapping[str, str]) -> str:
        """The text of a message: a text, or parts of ``kinds``, which name the field with their text."""
        return self.text() if isinstance(self.value, str) else "\n".join(self.each(lambda part: part.of_kind(kinds)))

    def of_kind(self, kinds: Mapping[str, str]) -> str:
        """The text of a part of a message."""
        kind = self["type"].value
        if not isinstance(kind, str) or kind not in kinds:
            raise RequestRefused(f"{self.place} is a part of type {kind!r:.80}, wanted text", param=self.place)
        return self[kinds[kind]].text()

    def refused(self, wanted: str) -> RequestRefused:
        """The refusal of a value of another kind."""
        return RequestRefused(f"{self.place} is {self.value!r:.80}, wanted {wanted}", param=self.place)


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
    accepted: ClassVar[Mapping[str, tuple[object, ...]]]  # values, besides null, of fields that would change the reply

    @abstractmethod
    def read(self, given: Field, earlier: Earlier) -> "ChatRequest":
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
    request = dialect.read(Field(given, ""), {} if earlier is None else earlier)
    if not request.messages:
        raise RequestRefused("there is no message, wanted at least one", param="messages")
    return request


def server_sent(data: Json) -> str:
    """An event of a stream, by the name of its ``type`` if it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"


def tool(given: Field, *, parameters: str = "parameters") -> EnvironmentTool:
    """A function that a client declares; ``parameters`` names the field of its schema."""
    schema = Field(given[parameters].value or NO_ARGUMENTS, given[parameters].place)
    if schema["properties"].value:
        schema["properties"].mapping()
    schema["required"].each(lambda name: name)
    return EnvironmentTool(
        name=given["name"].text(),
        description=str(given["description"].value or ""),
        parameters=schema.mapping(),
    )


def call(call_id: Field, name: Field, arguments: object) -> ToolCall:
    """A call in a reply; its arguments are JSON or an object."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return ToolCall(id=call_id.text(), name=name.text(), arguments=encodable(written or "{}"))
