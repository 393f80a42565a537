"""The endpoint of agents: a server and a key for each episode, and the APIs that agents speak.

    agent ── POST, see DIALECTS ──▶ serving ── ChatRequest ──▶ Inbox of the episode ──▶ environment
          ◀── JSON, or server-sent events ──── ChatReply ◀──── ChatRequest.reply ◀─────

What cannot be answered is refused in the form of its API's errors; clients repeat a request only if others wait (429).
"""

import asyncio
import json
import logging
import os
import resource
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from aiohttp import web

from condensegrpo.core.credentials import REMOVED, secret_values
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.tasks.agent_chat import ChatCompletions
from condensegrpo.tasks.agent_messages import Messages
from condensegrpo.tasks.agent_request import ChatReply, ChatRequest, Dialect, Earlier, RequestRefused, read_request
from condensegrpo.tasks.agent_responses import Responses

MODEL = "policy"
CHAT, MESSAGES = ChatCompletions(), Messages()
DIALECTS: tuple[Dialect, ...] = (CHAT, MESSAGES, Responses())
COUNT_TOKENS = f"{MESSAGES.path}/count_tokens"
ROUTES = ", ".join((*(f"POST {dialect.path}" for dialect in DIALECTS), f"POST {COUNT_TOKENS} and GET /v1/models"))
MAX_BYTES = 8 << 20  # of a request
SILENT_SECONDS = 10.0  # after which a connection is closed that makes no request, or sends no whole header
SILENT_SHARE = 4  # a peer may have a fourth of the descriptors for connections that have made no request yet
CREATED = "2026-01-01T00:00:00Z"  # a model's, which nobody asks for
SAY_EVERY = 60.0  # seconds between two lines about connections that could not be accepted
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Completing = Callable[[web.Request, Dialect], Awaitable[tuple[ChatRequest, ChatReply]]]
Count = Callable[[Sequence[Message], Sequence[EnvironmentTool]], int]
MAX_OPEN = 32  # requests of one episode at a time
_SILENT = dict[web.RequestHandler, str]()  # connections without a request to all servers here, and their peers


class Inbox:
    """The requests of one episode, answered one after another."""

    def __init__(self, limit: int) -> None:
        """``limit``: of requests, refused ones included."""
        self._limit = self._left = limit
        self._queue = asyncio.Queue[ChatRequest]()
        self._open = 0  # requests that are being read, or wait for their reply
        self._waiting = set[ChatRequest]()
        self._closed = False
        self.key = secrets.token_urlsafe(24)
        self._earlier: Earlier = {}
        self.count: Count | None = None  # of tokens, as soon as the episode knows how
        self.refused = ""  # why the last request was refused

    def hidden(self, text: str) -> str:
        """A text without the key of the episode and the credentials among the environment variables."""
        return hidden(text, self.key)

    def read(self, body: str, dialect: Dialect) -> ChatRequest:
        """The request of a body, without secrets."""
        return read_request(self.hidden(body), dialect, self._earlier)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """A block in which one more request is read and answered, if there may be one more."""
        self._left -= 1
        self._open += 1
        try:
            if self._left < 0:
                raise RequestRefused(f"the episode had its {self._limit} requests", status=403)
            if self._open > MAX_OPEN:
                raise RequestRefused(f"{MAX_OPEN} requests of the episode wait already", status=429)
            yield
        except RequestRefused as refused:
            self.refused = str(refused)
            raise
        finally:
            self._open -= 1

    async def reply_to(self, request: ChatRequest) -> ChatReply:
        """What the policy replies."""
        if self._closed:  # while the request was read
            raise RequestRefused("the episode has ended", status=410)
        self._waiting.add(request)
        self._queue.put_nowait(request)
        try:
            return await request.reply
        finally:
            self._waiting.discard(request)

    async def next(self) -> ChatRequest:
        """The next request whose client is still there."""
        while True:
            request = await self._queue.get()
            if not request.reply.done():
                return request

    def close(self) -> None:
        """Refuse what is waiting and what will come."""
        self._closed = True
        for request in self._waiting:
            if not request.reply.done():
                request.reply.set_exception(RequestRefused("the episode has ended", status=410))


@asynccontextmanager
async def serving(inbox: Inbox) -> AsyncIterator[str]:
    """A block in which the requests of an inbox are served, by its key alone; the base URL for clients."""

    def check_key(http: web.Request) -> None:
        if inbox.key not in api_keys(http):
            raise RequestRefused("the key is not that of the episode", status=401)

    async def complete(http: web.Request, dialect: Dialect) -> tuple[ChatRequest, ChatReply]:
        check_key(http)
        with inbox.admitted():
            request = inbox.read(await read_body(http), dialect)
            return request, await inbox.reply_to(request)

    async def count(http: web.Request) -> int:
        check_key(http)
        if inbox.count is None:
            raise RequestRefused("the episode has not begun", status=503)
        request = inbox.read(await read_body(http), MESSAGES)
        return await asyncio.to_thread(inbox.count, request.messages, request.tools)

    runner = await chat_runner(complete, count, MODEL, check_key)
    async with listening(runner, "127.0.0.1", 0) as port:
        yield f"http://127.0.0.1:{port}/v1"


def api_keys(http: web.Request) -> list[str]:
    """The keys of a request: OpenAI's and Anthropic's clients send theirs in different headers, some send two."""
    return [http.headers.get("Authorization", "").partition("Bearer ")[2], http.headers.get("x-api-key", "")]


def client_variables(url: str, key: str) -> dict[str, str]:
    """The environment variables from which clients of OpenAI and Anthropic read a base URL and a key."""
    openai = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    return {**openai, "ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}


def hidden(text: str, key: str) -> str:
    """A text without a key and the credentials among the environment variables."""
    for secret in (key, *secret_values(os.environ)):
        text = text.replace(secret, REMOVED).replace(json.dumps(secret)[1:-1], REMOVED)
    return text


async def _answer(http: web.Request, complete: Completing, dialect: Dialect) -> web.StreamResponse:
    """A reply as JSON, or as server-sent events where the request wants a stream."""
    request, reply = await complete(http, dialect)
    whole = dialect.written(request, reply)
    if not request.streams:
        return web.json_response(whole)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    for event in dialect.events(request, whole):
        await response.write(event.encode())
    await response.write_eof()
    return response


async def chat_runner(
    complete: Completing,
    count: Callable[[web.Request], Awaitable[int]],
    model: str,
    check_key: Callable[[web.Request], object],
    *,
    max_bytes: int = MAX_BYTES,
) -> web.AppRunner:
    """A server of the routes that clients of chat models call, set up and not listening yet.

    Args:
        complete: answers a request for a reply. What it refuses gets the form of its API's errors.
        count: the tokens of the prompt of a request of ``COUNT_TOKENS``.
        model: the only name in the list of models.
        check_key: raises RequestRefused for a request without a valid key.
        max_bytes: of a request.
    """

    @web.middleware
    async def made_a_request(request: web.Request, handler: Handler) -> web.StreamResponse:
        _SILENT.pop(request.protocol, None)
        return await handler(request)

    async def models(request: web.Request) -> web.Response:
        check_key(request)
        only = {"id": model, "object": "model", "type": "model", "display_name": model, "created_at": CREATED}
        return web.json_response({"object": "list", "data": [only], "has_more": False})

    async def count_tokens(request: web.Request) -> web.Response:
        return web.json_response({"input_tokens": await count(request)})

    application = web.Application(client_max_size=max_bytes, middlewares=[made_a_request, _with_refusals])
    for dialect in DIALECTS:
        application.router.add_post(dialect.path, partial(_answer, complete=complete, dialect=dialect))
    application.router.add_post(COUNT_TOKENS, count_tokens)
    application.router.add_get("/v1/models", models)
    runner = web.AppRunner(
        application,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        keepalive_timeout=SILENT_SECONDS,
    )
    await runner.setup()
    assert runner.server is not None
    accept, most = runner.server.connection_made, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SILENT_SHARE

    def accept_some(handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        accept(handler, transport)
        for each in [each for each in list(_SILENT) if each.transport is None]:  # it was closed
            _SILENT.pop(each, None)
        _SILENT[handler] = peer = str(transport.get_extra_info("peername", ("",))[0])
        if list(_SILENT.values()).count(peer) > most:
            transport.abort()

    runner.server.connection_made = accept_some  # type: ignore[method-assign]  # aiohttp has no limit of its own
    loop = asyncio.get_running_loop()
    if not isinstance(loop.get_exception_handler(), _Rarely):
        loop.set_exception_handler(_Rarely())
    return runner


class _Rarely:
    """Says once a minute that connections cannot be accepted; asyncio says it, with a traceback, for each of them."""

    def __init__(self) -> None:
        self._next = 0.0  # as ``time.monotonic``

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle what asyncio reports."""
        if not str(context.get("message")).startswith("socket.accept() out of system resource"):
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + SAY_EVERY
            logging.getLogger(__name__).error("accepting connections of agents: %s", context.get("exception"))


@web.middleware
async def _with_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A refusal in the form of the API's errors."""
    try:
        return await handler(request)
    except RequestRefused as error:
        refused = error
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        where = f"there is no {request.method} {request.path} here, only {ROUTES}"
        refused = RequestRefused(where, status=error.status)
    spoken = next((dialect for dialect in DIALECTS if request.path.startswith(dialect.path)), CHAT)
    return web.json_response(spoken.error(refused), status=refused.status)


@asynccontextmanager
async def listening(runner: web.AppRunner, host: str, port: int) -> AsyncIterator[int]:
    """A block in which a server listens at every address of a host, of IPv4 and IPv6, all at one port, which it gets.

    At its end the server is cleaned up, also one that could not listen. Port 0: any.
    """
    sockets, loop = list[socket.socket](), asyncio.get_running_loop()
    with ExitStack() as opened:
        try:
            found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, address in dict.fromkeys((family, address) for family, *_, address in found):
                server = socket.create_server((address[0], port, *address[2:]), family=family)
                sockets.append(opened.enter_context(server))
                port = server.getsockname()[1]
                await web.SockSite(runner, server).start()
            yield port
        finally:
            # closing a server leaks a connection that was accepted in this cycle of the loop (CPython issue 109564)
            for each in sockets:
                loop.remove_reader(each)
            try:
                await asyncio.sleep(0)
            finally:  # also when it is cancelled
                await runner.cleanup()


async def read_body(http: web.Request) -> str:
    """The text of a request; RequestRefused: it is too long or no UTF-8."""
    try:
        return (await http.read()).decode()
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestRefused(f"the body exceeds {http.client_max_size / (1 << 20):g} MiB", status=413) from error
    except UnicodeDecodeError as error:
        raise RequestRefused(f"the body is no UTF-8: {error}") from error
