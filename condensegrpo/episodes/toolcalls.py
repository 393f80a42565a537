"""Running the tools that a reply calls, and putting the results back into the conversation.

    reply text ─ ToolFormat.parse ─▶ ToolCall | Malformed ─ Toolbox.run ─▶ one result message for each, in order

Whatever a model writes and whatever a tool does, the outcome is a message: a fault is an observation that starts with
``Error:`` and says what was wrong and what exists, never an exception but ``EnvironmentLost``.
"""

import asyncio
import inspect
import json
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import GenericAlias, MappingProxyType
from typing import Any, Literal, Self, Union

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from condensegrpo.core.errors import EnvironmentLost, PluginError
from condensegrpo.core.failures import at_definition, is_cancellation
from condensegrpo.core.messages import History, Message, ToolCall, encodable
from condensegrpo.core.protocols.tool import EnvironmentTool, Tool, ToolResult
from condensegrpo.core.threads import to_thread
from condensegrpo.core.wording import plural
from condensegrpo.episodes.parsing import ParsedReply
from condensegrpo.episodes.settings import ToolLimits
from condensegrpo.episodes.toolformats import (
    Malformed,
    ToolFormat,
    call_id_of,
    one_line_at_most,
    parsed_arguments,
    quoted,
    with_instructions,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswers:
    """The results of the tool calls of one reply."""

    calls: tuple[ToolCall, ...]  # those that could be read, in order
    messages: tuple[Message, ...]  # one for every attempt, in order, faults included
    attempted: int  # calls written, malformed ones included; 0: the reply calls no tool
    succeeded: int  # of which a tool ran and returned something that is no error text
    abandoned: int = 0  # of which a tool exceeded its time limit
    results: tuple[ToolResult, ...] = ()  # of the tools of the environment, in the order of the calls


DEFAULT_LIMITS = ToolLimits()
NO_CALLS = ToolAnswers(calls=(), messages=(), attempted=0, succeeded=0)


class Toolbox:
    """Runs the tools that a reply calls: those of the run, and those that the environment of one episode offers.

    The calls of one reply run at the same time, so tools must not depend on each other's order; their results come back
    in the order of the calls. A synchronous tool runs in a separate daemon thread: one that hangs costs its call the
    time limit and then lingers, since a thread cannot be stopped, but delays neither its siblings nor the exit. An
    asynchronous tool is cancelled at the limit.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool | EnvironmentTool],
        *,
        format: ToolFormat,  # noqa: A002  the word that the configuration uses
        limits: ToolLimits = DEFAULT_LIMITS,
    ) -> None:
        """Tools by the name that the model calls them by.

        Args:
            tools: typed functions with a Google docstring, synchronous or asynchronous; or tools of an environment.
            format: how calls are written.
            limits: of the calls.
        """
        self.format = format
        self._limits = limits
        self._tools = {
            name: _CallableTool.of_environment(tool)
            if isinstance(tool, EnvironmentTool)
            else _CallableTool.of_function(name, tool)
            for name, tool in tools.items()
        }
        self.schemas = tuple(tool.schema for tool in self._tools.values())
        self._of_condenser: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which the model calls the tools."""
        return tuple(self._tools)

    @property
    def template_schemas(self) -> tuple[dict[str, object], ...]:
        """The schemas that the chat template shows: all, unless the format explains the tools in the system message."""
        return () if self.format.instructions(self.schemas) else self.schemas

    def with_tools(self, offered: Sequence[EnvironmentTool]) -> "Toolbox":
        """The toolbox of one episode: these tools, and those that its environment offers."""
        names = [*self._tools, *(tool.name for tool in offered)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"tools() offers {', '.join(map(repr, twice))}, which another tool is called too")
        toolbox = copy(self)
        toolbox._tools = self._tools | {tool.name: _CallableTool.of_environment(tool) for tool in offered}
        toolbox.schemas = (*self.schemas, *(tool.schema for tool in offered))
        return toolbox

    def with_condenser_tools(self, offered: Sequence[EnvironmentTool]) -> "Toolbox":
        """The toolbox of a run: these tools, and those of its condenser, which no task explains."""
        toolbox = self.with_tools(offered)
        toolbox._of_condenser = frozenset(tool.name for tool in offered)
        return toolbox

    def introduced(self, pinned: Sequence[Message]) -> tuple[Message, ...]:
        """The pinned messages with a system message that explains the tools, unless the chat template shows them.

            system  Be brief.   ─▶   system  Be brief.⏎⏎You can use tools. To call one, write <tool>…

        Pinned messages without a system message get one. If a system message shows how a call is opened, the task
        explains its tools itself, and only those of a condenser are explained here.
        """
        explained = any(self.format.opening in message.text for message in pinned if message.role == "system")
        named = zip(self._tools, self.schemas, strict=True)
        schemas = tuple(schema for name, schema in named if not explained or name in self._of_condenser)
        instructions = self.format.instructions(schemas)
        return with_instructions(pinned, instructions) if instructions else tuple(pinned)

    def exhausted(self, turns: int, turns_of_query: int) -> str | None:
        """The limit that allows no more calls after so many replies that had some, in words; None: neither does."""
        most, most_of_query = self._limits.max_turns, self._limits.max_turns_per_query
        if most is not None and turns >= most:
            return f"{most} that had (rollout.tools.max_turns)"
        if most_of_query is not None and turns_of_query >= most_of_query:
            return f"{most_of_query} to the same query that had (rollout.tools.max_turns_per_query)"
        return None

    def calls_in(self, reply: ParsedReply) -> tuple[ToolCall | Malformed, ...]:
        """The calls that a reply makes."""
        return self.format.parse(reply.message.text) if reply.calls is None else reply.calls

    async def run(self, attempts: Sequence[ToolCall | Malformed], history: History) -> ToolAnswers:
        """Run the calls of a reply, and give the messages that follow it.

        Args:
            history: of the episode before the reply, for the tools of its environment.
        """
        if not attempts:
            return NO_CALLS
        if len(attempts) == 1:  # needs no task
            outcomes = [await self._outcome(attempts[0], history)]
        else:
            outcomes = await asyncio.gather(*(self._outcome(attempt, history) for attempt in attempts))
        return ToolAnswers(
            calls=tuple(attempt for attempt in attempts if isinstance(attempt, ToolCall)),
            messages=tuple(
                self._message(index, attempt, outcome.text).showing(outcome.result.media if outcome.result else ())
                for index, (attempt, outcome) in enumerate(zip(attempts, outcomes, strict=True))
            ),
            attempted=len(attempts),
            succeeded=sum(outcome.succeeded for outcome in outcomes),
            abandoned=sum(outcome.abandoned for outcome in outcomes),
            results=tuple(outcome.result for outcome in outcomes if outcome.result is not None),
        )

    def shown(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Messages of an environment that answers calls itself: results of tools in this format, shortened."""
        return tuple(self._result(message) if message.role == "tool" else message for message in messages)

    def _result(self, message: Message) -> Message:
        text = shortened(message.text_without_media, self._limits.max_chars)
        return self.format.result(message.tool_call_id or "", message.name or "", text).showing(message.media)

    def _message(self, index: int, attempt: ToolCall | Malformed, text: str) -> Message:
        call = (call_id_of(index), "") if isinstance(attempt, Malformed) else (attempt.id, attempt.name)
        return self.format.result(*call, shortened(text, self._limits.max_chars))

    async def _outcome(self, attempt: ToolCall | Malformed, history: History) -> "_Outcome":
        if isinstance(attempt, Malformed):
            return _failed(f"{attempt.reason}. {self._known()}")
        if attempt.name not in self._tools:
            return _failed(f"there is no tool {quoted(attempt.name)}. {self._known()}")
        tool = self._tools[attempt.name]
        try:
            arguments = tool.arguments(attempt.arguments)
        except ValueError as error:
            return _failed(f"{attempt.name}: {error}. It is called as {tool.usage}")
        return await self._limited(attempt.name, partial(tool.call, arguments, history), asynchronous=tool.asynchronous)

    async def _limited(self, name: str, call: Callable[[], Any], *, asynchronous: bool) -> "_Outcome":
        seconds = self._limits.seconds
        try:
            async with asyncio.timeout(seconds):
                return await (_awaited(name, call) if asynchronous else to_thread(partial(_ran, name, call)))
        except TimeoutError:  # none of the tool's: they are outcomes
            return replace(_failed(f"{name} did not finish within {plural(seconds, 'second')}"), abandoned=True)

    def _known(self) -> str:
        return f"The tools are: {', '.join(self._tools) or 'none'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallableTool:
    """A tool and the arguments that it takes."""

    schema: dict[str, Any]
    call: Callable[[Mapping[str, Any], History], Any]
    types: Mapping[str, Any]  # of the arguments, as annotations
    required: Collection[str]
    takes_others: bool  # arguments beyond those of ``types``
    usage: str  # for errors
    asynchronous: bool = True

    @classmethod
    def of_function(cls, name: str, function: Tool) -> Self:
        """A tool of the run: a function, called with its arguments by name."""
        schema = tool_schema(name, function)
        properties = schema["function"]["parameters"]["properties"]
        signature = inspect.signature(function, eval_str=True)
        parameters = {name: p for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
        return cls(
            schema=schema,
            call=lambda arguments, _: function(**arguments),
            types={
                # the docstring of a plain argument may list its choices
                name: json_type(properties[name]) if p.annotation in (str, int) else p.annotation
                for name, p in parameters.items()
            },
            required=[name for name, p in parameters.items() if p.default is p.empty],
            takes_others=len(parameters) < len(signature.parameters),
            usage=f"{name}{signature}",
            asynchronous=inspect.iscoroutinefunction(function),
        )

    @classmethod
    def of_environment(cls, tool: EnvironmentTool) -> Self:
        """A tool of an environment: called with its arguments and the history."""
        properties = tool.parameters.get("properties", {})
        return cls(
            schema=tool.schema,
            call=tool.call,
            types={name: json_type(schema) for name, schema in properties.items()},
            required=tool.parameters.get("required", ()),
            takes_others=tool.parameters.get("additionalProperties") not in (None, False),  # {} allows any value
            usage=f"{tool.name}({', '.join(properties)})",
        )

    def arguments(self, raw: str) -> dict[str, Any]:
        """The arguments of a call, from the JSON that the model wrote.

        Raises:
            ValueError: the tool does not take them; names the argument.
        """
        written = parsed_arguments(raw)
        missing = [name for name in self.required if name not in written]
        if missing:
            raise ValueError(f"missing a required argument: {missing[0]!r}")
        unknown = [name for name in written if name not in self.types]
        if unknown and not self.takes_others:
            raise ValueError(f"got an unexpected keyword argument {unknown[0]!r}")
        return {name: _validated(name, value, self.types.get(name, Any)) for name, value in written.items()}


def _validated(name: str, value: object, annotation: Any) -> Any:  # noqa: ANN401  what the annotation says
    text = encodable(json.dumps(value, ensure_ascii=False))
    try:
        adapter = _adapter(annotation)
    except TypeError:  # Annotated[int, {"unit": "cm"}] has no hash
        adapter = TypeAdapter[Any](annotation)
    try:
        return adapter.validate_json(text, strict=True)  # JSON has no tuples or enums to be strict about
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]["msg"]
        raise ValueError(f"argument {name!r} is {one_line_at_most(text)}: {fault}") from error


@lru_cache(maxsize=1024)
def _adapter(annotation: Any) -> TypeAdapter[Any]:  # noqa: ANN401  what a signature holds
    return TypeAdapter(annotation)


def json_type(schema: object) -> Any:  # noqa: ANN401  an annotation
    """The annotation for a JSON schema's type, choices and items; ``Any`` for what it does not know.

    {"type": "array", "items": {"enum": ["a", "b"]}}  →  list[Literal["a", "b"]]
    """
    if not isinstance(schema, Mapping):
        return Any
    choices, kinds = schema.get("enum"), schema.get("type")
    if choices and all(isinstance(choice, str | int | None) for choice in choices):
        annotation: Any = Literal[*choices]
    elif isinstance(kinds, list) and kinds:
        annotation = Union[*(json_type({**schema, "type": kind}) for kind in kinds)]
    elif kinds == "array":
        annotation = GenericAlias(list, json_type(schema.get("items")))
    else:
        annotation = _JSON_TYPES.get(kinds, Any) if isinstance(kinds, str) else Any
    return annotation | None if schema.get("nullable") else annotation


_JSON_TYPES: Mapping[object, Any] = MappingProxyType(
    {"string": str, "integer": int, "number": int | float, "boolean": bool, "object": dict[str, Any], "null": None}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    text: str
    succeeded: bool
    abandoned: bool = False
    result: ToolResult | None = None  # of a tool of the environment


def _returned(value: object) -> _Outcome:
    result = value if isinstance(value, ToolResult) else None
    text = as_text(value) if result is None else result.text
    pictures_alone = result is not None and bool(result.media) and not text.strip()
    return _Outcome(text=text, succeeded=pictures_alone or is_success(text), result=result)


def as_text(value: object) -> str:
    """The result of a tool as the model reads it: text as it is, nothing for None, JSON for the rest."""
    if value is None:
        return ""
    value = to_jsonable_python(value, fallback=str)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def is_success(text: str) -> bool:
    """Whether the text of a result is neither blank nor an error."""
    return bool(text.strip()) and not text.lstrip().startswith("Error:")


def _failed(reason: str) -> _Outcome:
    return _Outcome(text=f"Error: {reason}", succeeded=False)


def _raised(name: str, error: BaseException) -> _Outcome:
    return _failed(f"{name}: {traceback.format_exception_only(error)[-1].strip()}")


async def _awaited(name: str, call: Callable[[], Any]) -> _Outcome:
    try:
        returned = call()  # of an environment's tool that is no coroutine function: its result
        return _returned(await returned if inspect.isawaitable(returned) else returned)
    except EnvironmentLost:
        raise  # ends the episode
    except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:  # the boundary to a tool
        if is_cancellation(error):
            raise
        cancelled = isinstance(error, asyncio.CancelledError)
        return _failed(f"{name} was cancelled") if cancelled else _raised(name, error)


def _ran(name: str, call: Callable[[], object]) -> _Outcome:
    try:
        result = call()
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError("it returned a coroutine: define the tool with async def")
        return _returned(result)
    except BaseException as error:  # the boundary to a tool; nothing else would report it in its thread
        return _raised(name, error)


def tool_schema(name: str, tool: Tool) -> dict[str, Any]:
    """The JSON schema of a typed function with a docstring, as chat templates show it."""
    from transformers.utils import get_json_schema  # takes a second to import

    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # the boundary to transformers, which has an exception class for every lack
        raise PluginError(
            f"making the schema of tool {name!r}{at_definition(tool)}: {error}. A tool is a function with type "
            f"hints and a docstring that describes every argument under 'Args:'."
        ) from error
    return {**schema, "function": {**schema["function"], "name": name}}


def shortened(text: str, limit: int) -> str:
    """At most ``limit`` characters of a text, from its head and its tail, with a mark between them that says so."""
    text = encodable(text)
    if len(text) <= limit:
        return text
    head, tail = (limit + 1) // 2, limit // 2
    return f"{text[:head]}\n[… {len(text) - limit} characters left out …]\n{text[len(text) - tail :]}"
