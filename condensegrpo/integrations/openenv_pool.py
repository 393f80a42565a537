"""The sessions that episodes have with OpenEnv servers: which server, how many at the same time, and when to try again.

All coroutines run on the event loop of the pool. The wire format is JSON messages over a WebSocket, answered in order:

    ─▶  {"type": "reset", "data": {"seed": 3}}
    ◀─  {"type": "observation", "data": {"observation": {"text": "Guess."}, "reward": null, "done": false}}
    ─▶  {"type": "step", "data": {"guess": "five"}}
    ◀─  {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": […]}}

A session has an environment of its own on the server. The format is that of versions 0.2 to 0.10; the library is not
needed, so that servers of any of them can be used beside any other package.
"""

import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from socket import create_server
from typing import Annotated, TypeVar

import aiohttp
from annotated_types import Ge

from condensegrpo.core import process_guard
from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.credentials import redacted
from condensegrpo.core.errors import EnvironmentLost
from condensegrpo.integrations.mcp_client import MAX_BYTES, TOO_LONG, Json, Refused, messages_of
from condensegrpo.integrations.servers import END_SECONDS, SHOWN, ChildProcess, ServerAddress

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
PORT = "{port}"  # in a command: where it is to listen
HEARTBEAT = 40.0  # seconds between pings; a server that is silent for half as long after one is gone
FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0  # seconds before opening a session is tried again
FULL, INVALID = "CAPACITY_REACHED", "VALIDATION_ERROR"
ENDS = (FULL, "FACTORY_ERROR", "SESSION_ERROR")  # errors after which the server ends a session
EXPECTED = "wanted the messages of OpenEnv 0.2 or newer"


class InvalidAction(Refused):
    """The server refused an action that its schema does not allow."""


class NotReady(EnvironmentLost):
    """The server cannot be reached now, or ended the session. Another attempt may succeed."""


class ServerFull(NotReady):
    """All sessions of the server are in use."""


@dataclass(frozen=True, kw_only=True)
class OpenEnvServer(ServerAddress):
    """A server of environments; ``{port}`` in its command is where it is to listen."""

    sessions: Annotated[int, Ge(1)] = 32  # at the same time, of every process that plays episodes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.command and not any(PORT in argument for argument in self.arguments):
            raise ValueError(f"a command that says where to listen, as in --port {PORT}: found {self.command}")


class RunningServer:
    """A server with the sessions that it may have, and the process if it is one of ours."""

    def __init__(self, name: str, server: OpenEnvServer, seconds: float) -> None:
        """``name``: for messages; ``seconds``: in which it answers an attempt to open a session."""
        self.name = name
        self.actions: Json = {}  # the schema of its actions, once a session was opened
        self.avoided_until = 0.0  # as ``time.monotonic``: it was not ready
        self._server, self._seconds = server, seconds
        self._used = 0  # sessions that are open or awaited
        self._free = asyncio.Semaphore(server.sessions)
        self._url = re.sub("^ws", "http", server.url.rstrip("/"))
        self._preparing = asyncio.Lock()
        self._client: aiohttp.ClientSession | None = None
        self._process: ChildProcess | None = None

    @property
    def load(self) -> float:
        """The share of its sessions that is open or awaited."""
        return self._used / self._server.sessions

    @contextlib.asynccontextmanager
    async def reserved(self) -> AsyncIterator[None]:
        """A block that may have a session, once there is one for it."""
        self._used += 1
        try:
            async with self._free:
                yield
        finally:
            self._used -= 1

    @contextlib.asynccontextmanager
    async def connected(self) -> "AsyncIterator[Connection]":
        """A block with a new connection, to a server whose actions are known."""
        with self._reached():
            async with asyncio.timeout(self._seconds):
                async with self._preparing:
                    client = await self._prepared()
                socket = await client.ws_connect(
                    f"{self._url}/ws",
                    heartbeat=HEARTBEAT,
                    max_msg_size=MAX_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=END_SECONDS),
                )
        connection = Connection(self.name, socket)
        try:
            yield connection
        finally:
            await connection.close()

    async def described_end(self) -> str:
        """How its process ended; empty: it has none, or it goes on."""
        how = "" if self._process is None else f": it {await self._process.described_end()}"
        return how if self._process is not None and self._process.ended else ""

    async def close(self) -> None:
        """End its process and the connections."""
        if self._process is not None:
            await self._process.terminate()
            await self._process.close()
        if self._client is not None:
            await self._client.close()

    async def _prepared(self) -> aiohttp.ClientSession:
        """A client of the server, which runs as far as we know."""
        if self._client is None:
            traced = aiohttp.TraceConfig()
            traced.on_request_redirect.append(_refuse_redirect)
            self._client = aiohttp.ClientSession(
                headers=self._server.filled_headers(),
                connector=aiohttp.TCPConnector(limit=0),
                trust_env=False,
                trace_configs=[traced],
            )
        if self._server.command:
            await self._run()
        if not self.actions:
            async with self._client.get(f"{self._url}/schema", raise_for_status=True) as response:
                schemas = [message async for message in messages_of(response)]
            actions = schemas[0].get("action") if schemas else None
            if not isinstance(actions, dict) or not isinstance(actions.get("properties"), dict):
                raise EnvironmentLost(f"the OpenEnv server {self.name} has the schema {actions!r:.80}, {EXPECTED}")
            self.actions = actions
        return self._client

    async def _run(self) -> None:
        """Start the process unless it runs."""
        if self._process is not None and self._process.ended:
            process, self._process = self._process, None
            how = await process.described_end()
            await process.close()
            if not self.actions:  # it never listened
                raise EnvironmentLost(f"the OpenEnv server {self.name} {how}")
        if self._process is None:
            with create_server((LOOPBACK, 0)) as unused:
                port = unused.getsockname()[1]
            self._url = f"http://{LOOPBACK}:{port}"
            guard = (sys.executable, "-P", process_guard.__file__)
            command = [argument.replace(PORT, str(port)) for argument in self._server.arguments]
            self._process = await ChildProcess.started(
                f"the OpenEnv server {self.name}", (*guard, *command), self._server.variables(), self._server.folder
            )

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Say why the server cannot be reached."""
        try:
            yield
        except aiohttp.ClientResponseError as error:
            lost = NotReady if error.status >= 500 or error.status == 429 else EnvironmentLost
            raise lost(f"the OpenEnv server {self.name} answered {error.status} {error.message}, {EXPECTED}") from error
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one
            fault = redacted(f"{type(error).__name__} {error}".strip())
            raise NotReady(f"the OpenEnv server {self.name} cannot be reached: {fault}") from error
        except Refused as error:
            raise EnvironmentLost(f"the OpenEnv server {self.name}: {redacted(str(error))}, {EXPECTED}") from error


async def _refuse_redirect(client: object, context: object, redirect: aiohttp.TraceRequestRedirectParams) -> None:
    """Redirects would be followed, and the headers that name credentials sent to wherever they lead."""
    answer = redirect.response
    raise aiohttp.ClientResponseError(answer.request_info, (), status=answer.status, message="(a redirect)")


class Connection:
    """An environment on a server. What it pays counts, also for a step whose caller gave up."""

    def __init__(self, name: str, socket: "aiohttp.ClientWebSocketResponse[bool]") -> None:
        """``name``: of the server, for messages."""
        self.rewards = list[float]()  # of its steps, those that had one
        self.done = False  # whether the environment ended the episode
        self._name, self._socket = name, socket
        self._turn = asyncio.Lock()  # of the request that is answered next
        self._asked = False  # whether it was sent, and its answer has not come
        self._answers = asyncio.Queue[Json | Refused | EnvironmentLost]()  # the last is why there are no more
        self._reader = asyncio.create_task(self._listen())  # always there: it also answers the server's pings

    async def request(self, kind: str, data: Json) -> Json:
        """The observation that follows from a ``reset`` or ``step``."""
        answer = await asyncio.shield(asyncio.create_task(self._answered(kind, data)))  # else the next one gets it
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _answered(self, kind: str, data: Json) -> Json | Exception:
        async with self._turn:
            self._asked = True
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # the reader has the reason
                await self._socket.send_str(json.dumps({"type": kind, "data": data}, default=str))
            answer = await self._answers.get()
            if isinstance(answer, EnvironmentLost):
                self._answers.put_nowait(answer)
                return type(answer)(str(answer))
            return answer

    async def close(self) -> None:
        """End the session; the server ends its environment before it confirms."""
        try:
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await self._socket.send_str('{"type": "close"}')
            await asyncio.wait([self._reader], timeout=END_SECONDS)
        finally:
            await self._socket.close()
            await asyncio.wait([self._reader])

    async def _listen(self) -> None:
        lost: EnvironmentLost = NotReady(f"the OpenEnv server {self._name} ended the session")
        try:
            async for message in self._socket:
                if isinstance(message.data, aiohttp.WebSocketError):
                    fault = TOO_LONG if message.data.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG else str(message.data)
                    raise EnvironmentLost(f"the OpenEnv server {self._name}: {fault}")
                self._answers.put_nowait(self._read(message.data))
        except EnvironmentLost as error:
            lost = error
        finally:
            self._answers.put_nowait(lost)

    def _read(self, text: object) -> Json | Refused:
        """The answer to a request, which may have been given up: what it pays counts all the same."""
        try:
            message = json.loads(text if isinstance(text, str) else "null")
            data, failed = message["data"], message["type"] == "error"
            if not self._asked and not (failed and data.get("code") in ENDS):
                raise LookupError("no request awaits an answer: it would count as that of the next one")
            self._asked = False
            if failed:
                errors = data.get("errors") or ()  # what is wrong with which part of the action
                details = "".join(f"; {'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors)
                fault, code = redacted(f"{data['message']}{details}")[:SHOWN], data.get("code")
                if code in ENDS:
                    raise (ServerFull if code == FULL else EnvironmentLost)(f"the OpenEnv server {self._name}: {fault}")
                return (InvalidAction if code == INVALID else Refused)(fault)
            observation, reward, done = dict(data["observation"]), data["reward"], bool(data["done"])
            if reward is not None and not self.done:
                self.rewards.append(float(reward))
            self.done = self.done or done
            return observation
        except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            shown = redacted(text)[:SHOWN] if isinstance(text, str) else "binary data"
            raise EnvironmentLost(f"the OpenEnv server {self._name} sent {shown}, {EXPECTED}") from error


@dataclass(frozen=True, slots=True)
class EpisodeSession:
    """A connection to a server, and what its environment returned when it was reset."""

    server: RunningServer
    connection: Connection
    first: Json  # observation

    async def step(self, action: Json) -> Json:
        """The observation that follows from an action."""
        try:
            return await self.connection.request("step", action)
        except NotReady as error:
            raise EnvironmentLost(f"{error}{await self.server.described_end()}") from error


class SessionPool:
    """Opens sessions on an event loop of its own, where servers outlive the loop of an episode."""

    def __init__(self, servers: Mapping[str, OpenEnvServer], seconds: float) -> None:
        """``seconds``: for which opening a session is tried again while servers are not ready."""
        self._servers = [RunningServer(name, server, seconds) for name, server in servers.items()]
        self._seconds = seconds
        self._loop = BackgroundLoop("OpenEnv sessions")

    async def call(self, work: Coroutine[object, object, T]) -> T:
        """The result of a coroutine, from another event loop."""
        return await self._loop.call(work)

    @contextlib.asynccontextmanager
    async def session(self, arguments: Json) -> AsyncIterator[EpisodeSession]:
        """A block with a session whose environment was reset; where servers are not ready, it is tried again."""
        began, delay, jitter = 0.0, FIRST_DELAY, random.Random()  # not the generator of the process
        while True:
            server = self._least_used()
            async with contextlib.AsyncExitStack() as held:
                await held.enter_async_context(server.reserved())
                began = began or time.monotonic()
                try:
                    connection = await held.enter_async_context(server.connected())
                    session = EpisodeSession(server, connection, await connection.request("reset", arguments))
                except NotReady as error:
                    server.avoided_until = time.monotonic() + delay
                    if isinstance(error, ServerFull):
                        began = 0.0  # it is there; the time limit of the turn holds
                    elif time.monotonic() - began > self._seconds:
                        tried = f"tried for {self._seconds:g} seconds: task.options.start_seconds"
                        raise EnvironmentLost(f"{error} ({tried})") from error
                else:
                    yield session
                    return
            await asyncio.sleep(delay * jitter.uniform(0.5, 1.0))
            delay = min(2 * delay, LONGEST_DELAY)

    def close(self) -> None:
        """End the servers that were started here, and the loop."""
        self._loop.finish(self._close())

    def _least_used(self) -> RunningServer:
        """The server with the smallest load; one that was not ready a moment ago only if the others are in full use."""
        now = time.monotonic()
        return min(self._servers, key=lambda server: (server.avoided_until > now or server.load >= 1, server.load))

    async def _close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers), return_exceptions=True)
