"""The task ``mcp``: questions that are answered with the tools of servers of the Model Context Protocol.

    servers: {shop: {command: [python, shop.py]}}      started here, once a run or once an episode
    servers: {web: {url: "http://127.0.0.1:8000/mcp"}}  started elsewhere

Every tool of the servers is a tool of the episode. A server that ends while it is used ends the trajectories that use
it, as ``environment_error``; the next episode opens it again.
"""

import asyncio
import json
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Gt

from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.errors import EnvironmentLost
from condensegrpo.core.messages import History, Message
from condensegrpo.core.protocols.environment import Environment, Step
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.protocols.tool import EnvironmentTool, ToolResult
from condensegrpo.integrations.mcp_client import VERSION, Connection, HttpConnection, Json, ProcessConnection, Refused
from condensegrpo.integrations.servers import ChildProcess, ServerAddress, check_servers
from condensegrpo.tasks.jsonl import Jsonl

T = TypeVar("T")
CLIENT = {"name": "condensegrpo", "version": "1"}
MAX_PAGES = 100  # of a server's list of tools


@dataclass(frozen=True, kw_only=True)
class McpServer(ServerAddress):
    """A server and what it may be used for: a command speaks over its stdin and stdout, an address streamable HTTP."""

    tools: tuple[str, ...] | None = None  # names of those that are offered; None: all
    prefix: str = ""  # before the names of its tools


@dataclass(frozen=True, slots=True)
class OpenServer:
    """A server that has introduced itself."""

    connection: Connection
    tools: tuple[Json, ...]  # as it describes them
    prefix: str


@dataclass(kw_only=True, eq=False)
class Mcp(Jsonl):
    """Questions as of ``jsonl``, with the tools of servers of the Model Context Protocol."""

    servers: Mapping[str, McpServer]  # by a name for messages
    per: Literal["run", "episode"] = "run"  # what a server is opened for; for the run: once in every rollout process
    start_seconds: Annotated[float, Gt(0)] = 60.0  # in which a server has started and listed its tools

    def __post_init__(self) -> None:
        super().__post_init__()
        check_servers(self.servers)

    def environment(self, problem: Problem) -> "McpEpisode":
        """A fresh episode."""
        return McpEpisode(super().environment(problem), self._pool, shared=self.per == "run")

    @cached_property
    def _pool(self) -> "ServerPool":
        pool = ServerPool(self.servers, self.start_seconds)
        weakref.finalize(self, pool.close)  # at the latest when the process exits
        return pool


Sessions = dict[str, "asyncio.Task[OpenServer]"]  # by server: being opened, open, or lost


class ServerPool:
    """Opens servers on an event loop of its own, where they outlive the loop of an episode."""

    def __init__(self, servers: Mapping[str, McpServer], seconds: float) -> None:
        """``seconds``: in which a server must have started."""
        self.shared: Sessions = {}  # of all episodes
        self._servers, self._seconds = servers, seconds
        self._loop = BackgroundLoop("MCP servers")
        self._opening = set[asyncio.Task[OpenServer]]()  # under way, as are those that end
        self._ending = set[asyncio.Task[None]]()

    async def open(self, sessions: Sessions) -> Mapping[str, OpenServer]:
        """All servers by name; a session that is missing or was lost is opened."""
        return await self._loop.call(self._opened(sessions))

    async def call(self, server: OpenServer, tool: str, arguments: Mapping[str, Any]) -> Json:
        """What a tool returned; raises as ``Connection.request``."""
        parameters = {"name": tool, "arguments": dict(arguments)}
        return await self._loop.call(server.connection.request("tools/call", parameters))

    async def end(self, sessions: Sessions) -> None:
        """End sessions. Those that are being opened end too, which is not waited for: their episode was given up."""
        await self._loop.call(self._end(sessions))

    def close(self) -> None:
        """End the shared sessions, those that are being opened, and the loop."""
        self._loop.finish(self._closed())

    async def _opened(self, sessions: Sessions) -> Mapping[str, OpenServer]:
        lost = {name: sessions.pop(name) for name in [*sessions] if _is_lost(sessions[name])}
        ending = {name: _kept(self._ending, _ended([session])) for name, session in lost.items()}
        for name, server in self._servers.items():
            if name not in sessions:
                sessions[name] = _kept(self._opening, self._open(name, server, ending.get(name)))
        servers = await asyncio.gather(*(asyncio.shield(sessions[name]) for name in self._servers))
        return dict(zip(self._servers, servers, strict=True))

    async def _open(self, name: str, server: McpServer, ending: asyncio.Task[None] | None) -> OpenServer:
        """Open a session with a server and list its tools.

        Args:
            ending: of the session that was lost, awaited first: its process may hold what the new one needs.
        """
        if ending is not None:
            await asyncio.wait([ending])  # a cancellation does not interrupt it
        connection: Connection
        if server.command:
            process = await ChildProcess.started(
                f"the MCP server {name}", server.arguments, server.variables(), server.folder
            )
            connection = ProcessConnection(name, process)
        else:
            connection = HttpConnection(name, server.url, server.filled_headers())
        try:
            async with asyncio.timeout(self._seconds):
                hello = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": CLIENT}
                await connection.request("initialize", hello)
                await connection.notify("notifications/initialized", {})
                return OpenServer(connection, await _listed(name, server, connection), server.prefix)
        except BaseException as error:
            await self._uninterrupted(connection.close())
            if isinstance(error, TimeoutError):
                seconds = f"{self._seconds:g} seconds (task.options.start_seconds)"
                raise EnvironmentLost(f"the MCP server {name} did not start within {seconds}") from error
            if isinstance(error, Refused):
                raise EnvironmentLost(f"the MCP server {name} refused to start: {error}") from error
            raise

    async def _end(self, sessions: Sessions) -> None:
        all_open = all(session.done() for session in sessions.values())
        ending = _kept(self._ending, _ended(sessions.values()))
        if all_open:
            await asyncio.shield(ending)

    async def _uninterrupted(self, ending: Coroutine[Any, Any, None]) -> None:
        """Wait for what a cancellation leaves to itself: ``close`` waits for it too."""
        await asyncio.shield(_kept(self._ending, ending))

    async def _closed(self) -> None:
        await _ended([*self._opening, *self.shared.values()])
        await asyncio.gather(*self._ending, return_exceptions=True)


def _kept(tasks: set[asyncio.Task[T]], work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that is one of ``tasks`` until it is done."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def _is_lost(session: asyncio.Task[OpenServer]) -> bool:
    """Whether a session could not be opened, or can be used no longer."""
    return session.done() and bool(session.cancelled() or session.exception() or session.result().connection.lost)


async def _ended(sessions: Collection[asyncio.Task[OpenServer]]) -> None:
    for session in sessions:
        session.cancel()  # one that is open stays so
    outcomes = await asyncio.gather(*sessions, return_exceptions=True)
    connections = [outcome.connection for outcome in outcomes if isinstance(outcome, OpenServer)]
    await asyncio.gather(*(connection.close() for connection in connections), return_exceptions=True)


class McpEpisode(Environment):
    """One question of the task ``jsonl``, with the tools of the servers."""

    def __init__(self, questions: Environment, pool: ServerPool, *, shared: bool) -> None:
        """``shared``: the servers serve other episodes too."""
        self._questions, self._pool = questions, pool
        self._sessions: Sessions = pool.shared if shared else {}
        self._opened: Mapping[str, OpenServer] = {}

    async def start(self) -> tuple[Message, ...]:
        """The question, once the servers are there."""
        self._opened = await self._pool.open(self._sessions)
        return await self._questions.start()

    def tools(self) -> Sequence[EnvironmentTool]:
        """The tools of all servers."""
        owners, offered = dict[str, str](), list[EnvironmentTool]()
        for name, opened in self._opened.items():
            for tool in opened.tools:
                called = f"{opened.prefix}{tool['name']}"
                if called in owners:
                    raise ValueError(
                        f"the MCP servers {owners[called]} and {name} both have a tool {called!r}: set "
                        f"task.options.servers.{name}.prefix, or leave it out of its tools"
                    )
                owners[called] = name
                offered.append(offered_tool({**tool, "name": called}, partial(self._use, opened, tool["name"])))
        return offered

    async def step(self, reply: Message) -> Step:
        """What follows from a reply that calls no tool, see ``AnswerEnvironment``."""
        return await self._questions.step(reply)

    async def close(self) -> None:
        """End the servers of this episode."""
        if self._sessions is not self._pool.shared:
            await self._pool.end(self._sessions)

    async def _use(self, server: OpenServer, tool: str, arguments: Mapping[str, Any], history: History) -> str:
        try:
            return text_of(await self._pool.call(server, tool, arguments))
        except Refused as error:
            return f"Error: {error}"


def text_of(result: Json) -> str:
    """What a policy reads of a tool's result: its texts; of pictures and other data their kind and size."""
    blocks = result.get("content")
    texts = [_text_of_block(block) for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []
    if not texts and "structuredContent" in result:
        texts = [json.dumps(result["structuredContent"], ensure_ascii=False)]
    text = "\n".join(texts)
    return f"Error: {text}" if result.get("isError") else text


def _text_of_block(block: Json) -> str:
    resource = block.get("resource")
    content: Json = resource if isinstance(resource, dict) else block
    if isinstance(content.get("text"), str):
        return str(content["text"])
    size = len(str(content.get("data") or content.get("blob") or "")) * 3 // 4  # of base64
    return f"[{block.get('type')} {content.get('mimeType') or ''}, {size} bytes, not shown]"


async def _listed(name: str, server: McpServer, connection: Connection) -> tuple[Json, ...]:
    """The tools of a server that are to be offered."""
    listed, cursor = list[Json](), None
    for _ in range(MAX_PAGES):
        page = await connection.request("tools/list", {"cursor": cursor} if cursor else {})
        tools = page.get("tools")
        for tool in tools if isinstance(tools, list) else [tools]:
            listed.append(listed_tool(tool, "inputSchema", f"MCP server {name}"))
        cursor = page.get("nextCursor")
        if not cursor:
            break
    if server.tools is None:
        return tuple(listed)
    by_name = {tool["name"]: tool for tool in listed}
    if missing := [chosen for chosen in server.tools if chosen not in by_name]:
        raise ValueError(f"the MCP server {name} has no tool {missing[0]!r}, its tools are: {', '.join(by_name)}")
    return tuple(by_name[chosen] for chosen in server.tools)


def listed_tool(value: Any, schema: str, server: str) -> Json:  # noqa: ANN401  what a server wrote
    """A tool as a server describes it: by its name, and under the key ``schema`` by an object of arguments."""
    named = isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get(schema), dict)
    if not named or not isinstance(value[schema].get("properties") or {}, dict):
        raise ValueError(
            f"the {server} lists {value!r:.200}, wanted a tool with name and {schema}, whose properties are an object"
        )
    described: Json = value
    return described


def offered_tool(tool: Json, call: Callable[..., Awaitable[ToolResult | str]]) -> EnvironmentTool:
    """A tool of an episode, from what a server says of it."""
    schema = tool["inputSchema"] if "inputSchema" in tool else tool["input_schema"]  # of MCP; of OpenEnv
    description = str(tool.get("description") or "")
    return EnvironmentTool(name=tool["name"], description=description, parameters=schema, call=call)
