"""Running the tools that a reply calls, and putting the results back into the conversation.

    reply text ─ ToolFormat.parse ─▶ ToolCall | Malformed ─ Toolbox.answer ─▶ one result message for each, in order

Whatever a model writes and whatever a tool does, the outcome is a message: a fault is an observation that starts with
``Error:`` and says what was wrong and what exists, never an exception.
"""

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from condensegrpo.core.errors import PluginError
from condensegrpo.core.failures import Failure, at_definition
from condensegrpo.core.messages import Message, ToolCall
from condensegrpo.core.plugin_task import Blocked, plugin_task, wait_for_task
from condensegrpo.core.protocols import Tool
from condensegrpo.core.thread_call import awaited_in_thread
from condensegrpo.core.wording import counted
from condensegrpo.rollout.codeformat import Code
from condensegrpo.rollout.toolformats import (
    JSON_FORMATS,
    Malformed,
    ToolFormat,
    call_id_of,
    parsed_arguments,
    quoted,
)

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType({**JSON_FORMATS, "code": Code()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswers:
    """What came of the tool calls of one reply."""

    calls: tuple[ToolCall, ...]  # those that could be read, in order
    messages: tuple[Message, ...]  # one for every attempt, in order, faults included
    attempted: int  # calls written, malformed ones included; 0: the reply calls no tool
    succeeded: int  # of which a tool ran and returned something that is no error text
    abandoned: int = 0  # of which a tool exceeded its time limit


NO_CALLS = ToolAnswers(calls=(), messages=(), attempted=0, succeeded=0)


class Toolbox:
    """Runs the tools that a reply calls.

    The calls of one reply run at the same time, so tools must not depend on each other's order; their results come back
    in the order of the calls. A synchronous tool runs in a daemon thread of its own: one that hangs costs its own call
    the time limit and then lingers, since a thread cannot be stopped, but holds up neither its siblings nor the exit.
    An asynchronous tool is cancelled at the limit, or abandoned in its thread if it holds up the event loop.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        *,
        format: ToolFormat,  # noqa: A002  the word that the configuration uses
        seconds: float,
        max_chars: int = 4000,
        max_turns: int | None = None,
        max_turns_per_query: int | None = None,
    ) -> None:
        """Tools by the name that the model calls them by.

        Args:
            tools: typed functions with a Google docstring, synchronous or asynchronous.
            format: how calls are written.
            seconds: that one call may take.
            max_chars: of a result that are shown; the middle of a longer one is left out.
            max_turns: replies of one episode whose calls are run; None: all.
            max_turns_per_query: replies to one query of it, likewise.

        Raises:
            PluginError: a tool has no type hints or no docstring to make a schema of.
        """
        if seconds <= 0 or max_chars < 1:
            raise ValueError(f"a toolbox needs seconds > 0 and max_chars > 0, found {seconds} and {max_chars}")
        self.format = format
        self._max_turns = max_turns
        self._max_turns_per_query = max_turns_per_query
        self.schemas: tuple[dict[str, object], ...] = tuple(_schema(name, tool) for name, tool in tools.items())
        self.names = tuple(tools)
        self._tools = dict(tools)
        self._signatures = {name: inspect.signature(tool) for name, tool in tools.items()}
        self._seconds = seconds
        self._max_chars = max_chars

    def introduced(self, pinned: Sequence[Message]) -> tuple[Message, ...]:
        """The pinned messages with a system message that explains the tools, unless the chat template shows them.

            system  Be brief.   ─▶   system  Be brief.⏎⏎You can use tools. To call one, write <tool>…

        Pinned messages without a system message get one. If a system message shows how a call is opened, the task
        explains its tools itself, and the pinned messages stay unchanged.
        """
        instructions = self.format.instructions(self.schemas)
        systems = [index for index, message in enumerate(pinned) if message.role == "system"]
        if not instructions or any(self.format.opening in pinned[index].content for index in systems):
            return tuple(pinned)
        if not systems:
            return (Message(role="system", content=instructions), *pinned)
        first = systems[0]
        content = "\n\n".join(text for text in (pinned[first].content, instructions) if text)
        return (*pinned[:first], replace(pinned[first], content=content), *pinned[first + 1 :])

    def exhausted(self, *, turns: int, turns_of_query: int) -> str | None:
        """Which limit allows no more calls after so many replies that had some, in words; None: neither."""
        if self._max_turns is not None and turns >= self._max_turns:
            return f"{self._max_turns} that had (rollout.tools.max_turns)"
        if self._max_turns_per_query is not None and turns_of_query >= self._max_turns_per_query:
            return f"{self._max_turns_per_query} to the same query that had (rollout.tools.max_turns_per_query)"
        return None

    async def answer(self, text: str) -> ToolAnswers:
        """Read the calls of a reply, run them, and give the messages that follow it. Never raises for what they do."""
        attempts = self.format.parse(text)
        if not attempts:
            return NO_CALLS
        if len(attempts) == 1:  # needs no task
            outcomes = [await self._outcome(attempts[0])]
        else:
            outcomes = await asyncio.gather(*map(self._outcome, attempts))
        return ToolAnswers(
            calls=tuple(attempt for attempt in attempts if isinstance(attempt, ToolCall)),
            messages=tuple(
                self._message(index, attempt, outcome.text)
                for index, (attempt, outcome) in enumerate(zip(attempts, outcomes, strict=True))
            ),
            attempted=len(attempts),
            succeeded=sum(outcome.succeeded for outcome in outcomes),
            abandoned=sum(outcome.abandoned for outcome in outcomes),
        )

    def _message(self, index: int, attempt: ToolCall | Malformed, text: str) -> Message:
        call = (call_id_of(index), "") if isinstance(attempt, Malformed) else (attempt.id, attempt.name)
        return self.format.result(*call, _shortened(text, self._max_chars))

    async def _outcome(self, attempt: ToolCall | Malformed) -> "_Outcome":
        if isinstance(attempt, Malformed):
            return _failed(f"{attempt.reason}. {self._known()}")
        if attempt.name not in self._tools:
            return _failed(f"there is no tool {quoted(attempt.name)}. {self._known()}")
        tool = self._tools[attempt.name]
        signature = self._signatures[attempt.name]
        try:
            arguments = parsed_arguments(attempt.arguments)
            signature.bind(**arguments)
        except (TypeError, ValueError) as error:
            return _failed(f"{attempt.name}: {error}. It is called as {attempt.name}{signature}")
        return await self._limited(attempt.name, tool, arguments)

    async def _limited(self, name: str, tool: Tool, arguments: Mapping[str, object]) -> "_Outcome":
        call = partial(tool, **arguments)
        if not inspect.iscoroutinefunction(tool):
            outcome = await awaited_in_thread(partial(_ran, name, call), name=f"tool {name}", seconds=self._seconds)
            return self._abandoned(name) if isinstance(outcome, Failure) else outcome
        task = plugin_task(_awaited(name, call), name=f"tool {name}", seconds=self._seconds)
        try:
            if not await wait_for_task(task, self._seconds):
                return self._abandoned(name)
            return _failed(f"{name} was cancelled") if task.cancelled() else task.result()
        except Blocked:
            return self._abandoned(name)
        finally:
            task.cancel()

    def _abandoned(self, name: str) -> "_Outcome":
        return _Outcome(
            text=f"Error: {name} did not finish within {counted(self._seconds, 'second')}",
            succeeded=False,
            abandoned=True,
        )

    def _known(self) -> str:
        return f"The tools are: {', '.join(self._tools) or 'none'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    text: str
    succeeded: bool
    abandoned: bool = False


def _returned(value: object) -> _Outcome:
    """A result that is itself an error text, or blank, is no success."""
    text = str(value)
    return _Outcome(text=text, succeeded=bool(text.strip()) and not text.lstrip().startswith("Error:"))


def _failed(reason: str) -> _Outcome:
    return _Outcome(text=f"Error: {reason}", succeeded=False)


def _raised(name: str, error: BaseException) -> _Outcome:
    return _failed(f"{name}: {traceback.format_exception_only(error)[-1].strip()}")


async def _awaited(name: str, call: Callable[[], Any]) -> _Outcome:
    try:
        return _returned(await call())
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # the boundary to a tool; an exit would end the loop
        return _raised(name, error)


def _ran(name: str, call: Callable[[], object]) -> _Outcome:
    try:
        result = call()
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError("it returned a coroutine: define the tool with async def")
        return _returned(result)
    except BaseException as error:  # the boundary to a tool; nothing else would report it in its thread
        return _raised(name, error)


def _schema(name: str, tool: Tool) -> dict[str, object]:
    from transformers.utils import get_json_schema  # takes a second to import

    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # the boundary to transformers, which has an exception class for every lack
        raise PluginError(
            f"making the schema of tool {name!r}{at_definition(tool)}: {error}. A tool is a function with type "
            f"hints and a docstring that describes every argument under 'Args:'."
        ) from error
    return {**schema, "function": {**schema["function"], "name": name}}


def _shortened(text: str, limit: int) -> str:
    """At most ``limit`` characters of a text, from its head and its tail, with a mark between them that says so."""
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate can be neither tokenised nor saved
    if len(text) <= limit:
        return text
    head, tail = (limit + 1) // 2, limit // 2
    return f"{text[:head]}\n[… {len(text) - limit} characters left out …]\n{text[len(text) - tail :]}"
