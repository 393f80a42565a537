"""The task ``openenv``: environments of OpenEnv servers. Each episode has a session, and in it its own environment.

    servers: {words: {url: "http://127.0.0.1:8000"}}                                         started elsewhere
    servers: {words: {command: "uvicorn words.server.app:app --port {port}", sessions: 8}}    started here

A row of a data set is a problem, whose columns are the arguments of ``reset``; without a data set, a seed is. Of most
environments a reply is the action: what its last ``<action>`` tag holds, or the whole reply without its thoughts, fills
one field. Of an environment that takes calls of tools, its tools are the tools of the episode.
"""

import asyncio
import contextlib
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any

import numpy
from annotated_types import Gt

from condensegrpo.core.errors import DataError, EnvironmentLost
from condensegrpo.core.messages import History, MediaPart, Message
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem, Split
from condensegrpo.core.protocols.tool import EnvironmentTool, ToolResult
from condensegrpo.episodes.toolcalls import as_text, shortened
from condensegrpo.integrations.gym import Seeds, action_in, picture_of
from condensegrpo.integrations.mcp import listed_tool, offered_tool, text_of
from condensegrpo.integrations.mcp_client import Json, Refused
from condensegrpo.integrations.openenv_pool import EpisodeSession, InvalidAction, OpenEnvServer, SessionPool
from condensegrpo.integrations.reset_rows import ResetRows
from condensegrpo.integrations.servers import check_servers
from condensegrpo.tasks.answers import read_answer
from condensegrpo.vision.image_files import from_base64, part_of_file

CALL = {"type", "tool_name", "arguments"}  # the fields of an action that calls a tool
METADATA = "metadata"  # a field of every action, and since 0.10 of every observation
MAX_CHARS = 100_000  # of an observation; of a longer one the policy reads its beginning and its end


@dataclass(kw_only=True, eq=False)
class OpenEnv(Seeds, ResetRows):
    """Environments of OpenEnv servers, started here or elsewhere. No row and no seed is in both splits."""

    servers: Mapping[str, OpenEnvServer]  # by a name for messages; episodes are spread over them
    data: str | None = None  # training rows, see ``rows.read_rows``; None: problems are seeds
    action_field: str = ""  # that a reply fills; empty: the only one that the server requires
    action: Mapping[str, Any] | None = None  # the other fields of every action
    show: tuple[str, ...] = ()  # fields of observations that the policy reads; (): all but metadata and pictures
    pictures: tuple[str, ...] = ()  # fields of observations that the policy sees, after what it reads
    system: str = ""  # the system message; empty for none
    start_seconds: Annotated[float, Gt(0)] = 60.0  # for which a server that is not ready is tried again

    def __post_init__(self) -> None:
        check_servers(self.servers)
        if self.data is None and self.eval_data is not None:
            raise ValueError("found eval_data without data: rows are for both, or seeds")
        if self.data is not None:
            rows = self.read_splits(self.data)
            train, held_out = (
                tuple(replace(each, data={**self.arguments_of(split), **each.data}) for each in problems)
                for split, problems in {"train": rows.train, "eval": rows.held_out}.items()
            )
            self._splits = replace(rows, train=train, held_out=held_out)

    def problems(self, split: Split) -> Sequence[Problem]:
        """The rows of a split, in the order of the file, or its seeds."""
        if self.data is not None:
            return ResetRows.problems(self, split)
        names, arguments = ", ".join(self.servers), self.arguments_of(split)

        def problem(seed: int) -> Problem:
            data = {**arguments, "seed": seed}
            return Problem(id=f"{split}-{seed}", question=f"{names} with seed {seed}", data=data)

        return self.seeds(split, problem)

    def environment(self, problem: Problem) -> "OpenEnvEpisode":
        """A fresh episode."""
        return OpenEnvEpisode(self, problem.data, self._pool)

    def field_of(self, server: str, actions: Json) -> str:
        """The field of an action that a reply fills; empty: the action calls a tool.

        Args:
            server: its name, for messages.
            actions: the schema of its actions.
        """
        fields = actions["properties"].keys() - {METADATA}
        unknown = [name for name in self.action or {} if name not in actions["properties"]]
        if unknown and not actions.get("additionalProperties", True):  # the policy would read that, every turn
            raise ValueError(
                f"task.options.action names {unknown[0]!r}, the actions of the OpenEnv server {server} have the fields "
                f"{', '.join(sorted(fields))}"
            )
        if self.action_field in fields or (not self.action_field and fields <= CALL):
            return self.action_field
        required = [name for name in actions.get("required") or fields if name not in (self.action or {})]
        if self.action_field or len(required) != 1:
            raise ValueError(
                f"the actions of the OpenEnv server {server} have the fields {', '.join(sorted(fields))}: name the one "
                f"that a reply fills in task.options.action_field, and the values of others in task.options.action"
            )
        return str(required[0])

    def text_of_observation(self, observation: Json) -> str:
        """What the policy reads of an observation: one text as it is, anything else as JSON."""
        if missing := [name for name in self.show if name not in observation]:
            raise ValueError(
                f"task.options.show names {missing[0]!r}, the observation has the fields {', '.join(observation)}"
            )
        unread = {METADATA, *self.pictures}
        shown = {name: observation[name] for name in self.show or observation if self.show or name not in unread}
        only = next(iter(shown.values())) if len(shown) == 1 else shown
        return shortened(as_text(only) if shown else "", MAX_CHARS)

    def pictures_of_observation(self, observation: Json) -> tuple[MediaPart, ...]:
        """What the policy sees of an observation: of each field of ``pictures`` that has a value, its picture."""
        try:
            return tuple(_picture(observation[name], name) for name in self.pictures if observation.get(name))
        except (DataError, ValueError) as error:  # no fault of the policy, which would read another error of a tool
            raise EnvironmentLost(str(error)) from error

    @cached_property
    def _pool(self) -> SessionPool:
        pool = SessionPool(self.servers, self.start_seconds)
        weakref.finalize(self, pool.close)  # at the latest when the process exits
        return pool


class OpenEnvEpisode(Environment):
    """One episode: a session with a server."""

    def __init__(self, task: OpenEnv, arguments: Json, pool: SessionPool) -> None:
        """Nothing is opened before ``start``; ``arguments``: of the reset."""
        self._task, self._arguments, self._pool = task, arguments, pool
        self._held = contextlib.AsyncExitStack()  # the session; in the event loop of the pool
        self._starting = asyncio.Lock()  # there too: until a start that was cancelled has ended
        self._field, self._properties, self._definitions = "", dict[str, Json](), dict[str, Any]()
        self._tools = list[EnvironmentTool]()

    async def start(self) -> tuple[Message, ...]:
        """The system message, the row's prompt, and after it the first observation."""
        task, row = self._task, self._arguments
        self._session = session = await self._pool.call(self._opened(row))
        self._connection, server = session.connection, session.server
        self._field, self._properties = task.field_of(server.name, server.actions), server.actions["properties"]
        self._definitions = server.actions.get("$defs") or {}
        if not self._field:
            self._tools = [*self._offered(server.name, await self._stepped({"type": "list_tools"}))]
        text = task.text_of_observation(session.first)
        first = task.first_messages(row, f"\n{text}" if text and row.get(task.prompt) else text)
        *before, last = first
        last = last.showing(task.pictures_of_observation(session.first))
        return (*([Message(role="system", content=task.system)] if task.system else []), *before, last)

    def tools(self) -> Sequence[EnvironmentTool]:
        """The tools of the environment, if it has some."""
        return self._tools

    async def step(self, reply: Message) -> Step:
        """What follows from a reply that calls no tool: the next observation, or the end."""
        if not self._field:
            answer, rewards = read_answer(reply.text, self._task.answer_style), self._connection.rewards
            return Step(done=True, answer=answer, outcome=self._task.outcome_of(rewards) if rewards else None)
        observations = tuple[Message, ...]()
        if not self._connection.done:
            try:
                observation = await self._acted(action_in(reply.text))
            except InvalidAction as error:
                return Step(observations=(Message(role="user", content=f"Error: {error}"),))
            shown = Message(role="user", content=self._task.text_of_observation(observation))
            observations = (shown.showing(self._task.pictures_of_observation(observation)),)
        return Step(observations=observations, done=self._connection.done, outcome=self._outcome_at_end())

    async def close(self) -> None:
        """End the session."""
        await self._pool.call(self._end())

    async def _opened(self, arguments: Json) -> EpisodeSession:
        async with self._starting:
            return await self._held.enter_async_context(self._pool.session(arguments))

    async def _end(self) -> None:
        async with self._starting:
            await self._held.aclose()

    async def _stepped(self, action: Json) -> Json:
        return await self._pool.call(self._session.step(action))

    async def _acted(self, text: str) -> Json:
        """The observation that follows from an action."""
        value: object = text
        if not _takes_text(self._properties[self._field], self._definitions):
            with contextlib.suppress(ValueError):  # the server says what it wants
                value = json.loads(text)
        return await self._stepped({**(self._task.action or {}), self._field: value})

    def _outcome_at_end(self) -> float | None:
        """The outcome of the episode; None: it goes on."""
        return self._task.outcome_of(self._connection.rewards) if self._connection.done else None

    async def _use(self, name: str, arguments: Mapping[str, Any], history: History) -> ToolResult:
        text, media = "", tuple[MediaPart, ...]()
        try:
            if not self._connection.done:
                call = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
                observation = await self._stepped(call)
                text, media = self._text_of_result(observation), self._task.pictures_of_observation(observation)
        except Refused as error:
            text = f"Error: {error}"
        return ToolResult(text=text, media=media, done=self._connection.done, outcome=self._outcome_at_end())

    def _text_of_result(self, observation: Json) -> str:
        """What the policy reads of a tool's result."""
        error, result = observation.get("error"), observation.get("result")
        if error:
            return f"Error: {error.get('message') if isinstance(error, dict) else error}"
        if isinstance(result, dict) and isinstance(result.get("content"), list):
            return text_of({"content": result["content"], "isError": result.get("is_error")})
        return as_text(result) if "result" in observation else self._task.text_of_observation(observation)

    def _offered(self, server: str, observation: Json) -> Iterator[EnvironmentTool]:
        tools = observation.get("tools")
        for tool in tools if isinstance(tools, list) and tools else [observation]:
            described = listed_tool(tool, "input_schema", f"OpenEnv server {server}")
            yield offered_tool(described, partial(self._use, described["name"]))


def _takes_text(schema: Json, definitions: Json) -> bool:
    """Whether a field may hold a text: ``str | None`` is an ``anyOf``, a nested model or an enum a ``$ref``."""
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        return any(_takes_text(branch, definitions) for branch in branches)
    if "$ref" in schema:
        named = definitions.get(str(schema["$ref"]).rpartition("/")[2])
        return isinstance(named, dict) and named.keys() & {"type", "anyOf", "oneOf"} != set() and _takes_text(named, {})
    kinds = schema.get("type", "string")
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


def _picture(value: object, name: str) -> MediaPart:
    """A picture as servers send it: rows of pixels of three numbers from 0 to 255, a file in base64, or a data URI."""
    if isinstance(value, str):
        doing = f"reading the field {name} of an observation"
        return part_of_file(from_base64(value, doing), doing)
    pixels = numpy.array(value)
    if pixels.dtype.kind not in "iu" or not 0 <= pixels.min(initial=0) <= pixels.max(initial=0) <= 255:
        found = "pixels scaled to 0..1" if pixels.dtype.kind == "f" and pixels.max(initial=0) <= 1 else "other values"
        raise ValueError(f"the field {name} of an observation has {found}, wanted integers 0..255")
    if pixels.shape[2:] != (3,):
        raise ValueError(f"the field {name} of an observation has the shape {pixels.shape}, wanted rows × columns × 3")
    return picture_of(pixels.astype(numpy.uint8))
