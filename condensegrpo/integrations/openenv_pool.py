"""The sessions that episodes have with OpenEnv servers: which server, how many at the same time, and when to try again.

    EpisodeSession ─▶ SessionPool ─▶ RunningServer, the one with the smallest load ─▶ Session

All coroutines run on the event loop of the pool.
"""

import asyncio
import contextlib
import random
import re
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass
from socket import create_server
from typing import Annotated, TypeVar

import aiohttp
from annotated_types import Ge

from condensegrpo.core import process_guard
from condensegrpo.core.background_loop import BackgroundLoop
from condensegrpo.core.credentials import redacted
from condensegrpo.core.errors import EnvironmentLost
from condensegrpo.integrations.mcp_client import MAX_BYTES, Json, Refused, messages_of
from condensegrpo.integrations.openenv_client import EXPECTED, NotReady, ServerFull, Session
from condensegrpo.integrations.servers import END_SECONDS, ChildProcess, ServerAddress

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
PORT = "{port}"  # in a command: where it is to listen
HEARTBEAT = 40.0  # seconds between pings; a server that is silent for half as long after one is gone
FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0  # seconds before opening a session is tried again


@dataclass(frozen=True, kw_only=True)
class OpenEnvServer(ServerAddress):
    """A server of environments; ``{port}`` in its command is where it is to listen."""

    sessions: Annotated[int, Ge(1)] = 32  # at the same time, of every process that plays episodes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.command and not any(PORT in argument for argument in self.arguments):
            raise ValueError(f"the command of a server says where to listen, as in --port {PORT}: found {self.command}")


class RunningServer:
    """A server with the sessions that it may have, and the process if it is one of ours."""

    def __init__(self, name: str, server: OpenEnvServer, seconds: float) -> None:
        """``name``: for messages; ``seconds``: in which it answers an attempt to open a session."""
        self.name = name
        self.actions: Json = {}  # the schema of its actions
        self.avoided_until = 0.0  # as ``time.monotonic``: it was not ready
        self._server, self._seconds = server, seconds
        self._url = re.sub("^ws", "http", server.url.rstrip("/"))
        self._free, self._used = asyncio.Semaphore(server.sessions), 0
        self._preparing = asyncio.Lock()
        self._client: aiohttp.ClientSession | None = None
        self._process: ChildProcess | None = None

    @property
    def load(self) -> float:
        """Sessions that are open or awaited, as a share of those that it may have."""
        return self._used / self._server.sessions

    async def take(self) -> None:
        """Wait for one of its sessions to be free, and reserve it."""
        self._used += 1
        try:
            await self._free.acquire()
        except BaseException:
            self._used -= 1
            raise

    def free(self) -> None:
        """Give back a session that was taken."""
        self._used -= 1
        self._free.release()

    async def opened(self) -> Session:
        """A new session."""
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
                return Session(self.name, socket)

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
        """A client of the server, which runs as far as we know, and whose actions are known."""
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
            async with self._client.get(
                f"{self._url}/schema", raise_for_status=True, allow_redirects=False
            ) as response:
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
    """``ws_connect`` would follow it, and send the headers that name credentials to wherever it leads."""
    answer = redirect.response
    raise aiohttp.ClientResponseError(answer.request_info, (), status=answer.status, message="(a redirect)")


class SessionPool:
    """Opens sessions on an event loop of its own, where servers outlive the loop of an episode."""

    def __init__(self, servers: Mapping[str, OpenEnvServer], seconds: float) -> None:
        """``seconds``: for which opening a session is tried again while servers are not ready."""
        self.seconds = seconds
        self._servers = [RunningServer(name, server, seconds) for name, server in servers.items()]
        self._loop = BackgroundLoop("OpenEnv sessions")

    async def call(self, work: Coroutine[object, object, T]) -> T:
        """The result of a coroutine of an ``EpisodeSession``, from another event loop."""
        return await self._loop.call(work)

    def least_used(self) -> RunningServer:
        """The server with the smallest load; one that was not ready a moment ago only if the others are in full use."""
        now = time.monotonic()
        return min(self._servers, key=lambda server: (server.avoided_until > now or server.load >= 1, server.load))

    def close(self) -> None:
        """End the servers that were started here, and the loop."""
        self._loop.finish(self._close())

    async def _close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers), return_exceptions=True)


class EpisodeSession:
    """The session of one episode, from its reservation to its end. ``SessionPool.call`` runs its coroutines."""

    def __init__(self, pool: SessionPool) -> None:
        """Nothing is opened before ``start``."""
        self._pool = pool
        self._server: RunningServer | None = None
        self._session: Session | None = None
        self._starting = asyncio.Lock()  # until a start that was cancelled has ended

    @property
    def opened(self) -> Session:
        """The session, after ``start``."""
        assert self._session is not None
        return self._session

    @property
    def server(self) -> RunningServer:
        """Its server, after ``start``."""
        assert self._server is not None
        return self._server

    async def start(self, arguments: Json) -> Json:
        """Open a session and reset its environment; where servers are not ready, try again after a pause.

        Returns:
            The first observation.
        """
        async with self._starting:
            began, delay, jitter = 0.0, FIRST_DELAY, random.Random()  # not the generator of the process
            while True:
                server = self._pool.least_used()
                await server.take()
                self._server, began = server, began or time.monotonic()
                try:
                    self._session = await server.opened()
                    return await self._session.request("reset", arguments)
                except NotReady as error:
                    await self._freed()
                    server.avoided_until = time.monotonic() + delay
                    if isinstance(error, ServerFull):
                        began = 0.0  # it is there; the time limit of the turn holds
                    elif time.monotonic() - began > self._pool.seconds:
                        tried = f"tried for {self._pool.seconds:g} seconds: task.options.start_seconds"
                        raise EnvironmentLost(f"{error} ({tried})") from error
                await asyncio.sleep(delay * jitter.uniform(0.5, 1.0))
                delay = min(2 * delay, LONGEST_DELAY)

    async def step(self, action: Json) -> Json:
        """The observation that follows from an action; raises as ``Session.request``."""
        try:
            return await self.opened.request("step", action)
        except NotReady as error:
            raise EnvironmentLost(f"{error}{await self.server.described_end()}") from error

    async def close(self) -> None:
        """End the session."""
        async with self._starting:
            await self._freed()

    async def _freed(self) -> None:
        session, self._session = self._session, None
        server, self._server = self._server, None
        try:
            if session is not None:
                await session.close()
        finally:
            if server is not None:
                server.free()
