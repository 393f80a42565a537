"""The OpenAI-compatible endpoint of agents: one server for each event loop, one key for each episode.

    agent ── POST /v1/chat/completions ──▶ AgentEndpoint ── ChatRequest ──▶ Inbox of the episode ──▶ environment
          ◀── JSON, or server-sent events ──────────── ChatReply ◀──── ChatRequest.reply ◀─────

What cannot be answered is refused in the form of OpenAI's errors; clients repeat a request only if others wait (429).
"""

import asyncio
import json
import logging
import os
import resource
import secrets
import socket
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Self

from aiohttp import web

from condensegrpo.core.credentials import REMOVED, secret_values
from condensegrpo.core.trajectory import FinishReason
from condensegrpo.tasks.agent_request import ChatReply, ChatRequest, RequestRefused, read_request

MODEL = "policy"
MAX_BYTES = 8 << 20  # of a request
SILENT_SECONDS = 10.0  # after which a connection is closed that makes no request, or sends no whole header
SILENT_SHARE = 4  # a peer may have a fourth of the descriptors for connections that have made no request yet
SAY_EVERY = 60.0  # seconds between two lines about connections that could not be accepted
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_OPEN = 32  # requests of one episode at a time
_ENDPOINTS = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, "AgentEndpoint"]()


class Inbox:
    """The requests of one episode, answered one after another."""

    def __init__(self, endpoint: "AgentEndpoint", limit: int) -> None:
        self._endpoint = endpoint
        self._limit = self._left = limit
        self._queue = asyncio.Queue[ChatRequest]()
        self._open = 0  # requests that are being read, or wait for their reply
        self._waiting = set[ChatRequest]()
        self._closed = False
        self.key = secrets.token_urlsafe(24)
        self._secrets = (self.key, *secret_values(os.environ))
        self.refused = ""  # why the last request was refused

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return f"http://127.0.0.1:{self._endpoint.port}/v1"

    def hidden(self, text: str) -> str:
        """A text without the key of the episode and the credentials among the environment variables."""
        for secret in self._secrets:
            text = text.replace(secret, REMOVED).replace(json.dumps(secret)[1:-1], REMOVED)
        return text

    async def reply_to(self, http: web.Request, body: str | None = None) -> tuple[ChatRequest, ChatReply]:
        """A request and what the policy replies to it; ``body`` if it was read before."""
        self._left -= 1
        self._open += 1
        try:
            if self._left < 0:
                raise RequestRefused(f"the episode had its {self._limit} requests", status=403)
            if self._open > MAX_OPEN:
                raise RequestRefused(f"{MAX_OPEN} requests of the episode wait already", status=429)
            return await self._replied(read_request(self.hidden(await read_body(http) if body is None else body)))
        except RequestRefused as refused:
            self.refused = str(refused)
            raise
        finally:
            self._open -= 1

    async def _replied(self, request: ChatRequest) -> tuple[ChatRequest, ChatReply]:
        if self._closed:  # while the request was read
            raise RequestRefused("the episode has ended", status=410)
        self._waiting.add(request)
        self._queue.put_nowait(request)
        try:
            return request, await request.reply
        finally:
            self._waiting.discard(request)

    async def next(self) -> ChatRequest:
        """The next request whose client is still there."""
        while True:
            request = await self._queue.get()
            if not request.reply.done():
                return request

    async def close(self) -> None:
        """Refuse what is waiting and what will come; the server of the last inbox closes."""
        self._closed = True
        for request in self._waiting:
            if not request.reply.done():
                request.reply.set_exception(RequestRefused("the episode has ended", status=410))
        await self._endpoint.close(self)


class AgentEndpoint:
    """The server of one event loop. It opens with the first inbox and closes with the last."""

    def __init__(self) -> None:
        self._inboxes = dict[str, Inbox]()
        self._opening = asyncio.Lock()
        self._serving: tuple[web.AppRunner, socket.socket] | None = None  # the socket listens
        self.port = 0

    @classmethod
    async def opened(cls, limit: int) -> Inbox:
        """An inbox at the endpoint of the running event loop, for so many requests."""
        loop = asyncio.get_running_loop()
        endpoint = _ENDPOINTS.setdefault(loop, cls())
        inbox = Inbox(endpoint, limit)
        endpoint._inboxes[inbox.key] = inbox
        try:
            await endpoint._open()
        except BaseException:
            await endpoint.close(inbox)
            raise
        return inbox

    @classmethod
    def inbox(cls, key: str) -> Inbox:
        """The inbox of a running episode of this event loop; RequestRefused for any other key."""
        endpoint = _ENDPOINTS.get(asyncio.get_running_loop())
        if endpoint is None or key not in endpoint._inboxes:
            raise RequestRefused("the key is of no running episode: it is wrong, or its episode has ended", status=401)
        return endpoint._inboxes[key]

    async def close(self, inbox: Inbox) -> None:
        """Forget an inbox."""
        self._inboxes.pop(inbox.key, None)
        if self._inboxes:
            return
        _ENDPOINTS.pop(asyncio.get_running_loop(), None)
        if self._serving is not None:
            served, self._serving = self._serving, None
            await close_server(*served)

    async def _open(self) -> Self:
        async with self._opening:
            if self._serving is not None:
                return self
            runner = await chat_runner(_complete, MODEL, _inbox_of)
            listening: socket.socket | None = None
            try:
                listening = socket.create_server(("127.0.0.1", 0))
                await web.SockSite(runner, listening).start()
            except BaseException:
                if listening is not None:
                    listening.close()
                await runner.cleanup()
                raise
            self._serving, self.port = (runner, listening), listening.getsockname()[1]
        return self


def _inbox_of(http: web.Request) -> Inbox:
    return AgentEndpoint.inbox(http.headers.get("Authorization", "").partition("Bearer ")[2])


async def _complete(http: web.Request) -> web.StreamResponse:
    return await answer(http, *await _inbox_of(http).reply_to(http))


async def answer(http: web.Request, request: ChatRequest, reply: ChatReply) -> web.StreamResponse:
    """A reply as JSON, or as server-sent events where the request wants a stream."""
    completion = _completion(request, reply)
    if not request.stream:
        return web.json_response(completion)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    for event in _events(completion, usage=request.stream_usage):
        await response.write(f"data: {event}\n\n".encode())
    await response.write_eof()
    return response


async def chat_runner(
    complete: Handler, model: str, check_key: Callable[[web.Request], object], *, max_bytes: int = MAX_BYTES
) -> web.AppRunner:
    """A server of OpenAI's two routes that clients of chat models call, set up and not listening yet.

    Args:
        complete: answers a request for a completion. What it refuses gets the form of OpenAI's errors.
        model: the only name in the list of models.
        check_key: raises RequestRefused for a request without a valid key.
        max_bytes: of a request.
    """
    silent = dict[web.RequestHandler, str]()  # connections without a request, and their peers

    @web.middleware
    async def made_a_request(request: web.Request, handler: Handler) -> web.StreamResponse:
        silent.pop(request.protocol, None)
        return await handler(request)

    async def models(request: web.Request) -> web.Response:
        check_key(request)
        return web.json_response({"object": "list", "data": [{"id": model, "object": "model"}]})

    application = web.Application(client_max_size=max_bytes, middlewares=[made_a_request, _with_refusals])
    application.router.add_post("/v1/chat/completions", complete)
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
        for each in [each for each in silent if each.transport is None]:
            del silent[each]  # it was closed
        silent[handler] = peer = str(transport.get_extra_info("peername", ("",))[0])
        if list(silent.values()).count(peer) > most:
            transport.abort()

    runner.server.connection_made = accept_some  # type: ignore[method-assign]  # aiohttp has no limit of its own
    asyncio.get_running_loop().set_exception_handler(_Rarely())
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
    """A refusal as OpenAI's error."""
    try:
        return await handler(request)
    except RequestRefused as error:
        refused = error
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        known = "POST /v1/chat/completions and GET /v1/models"
        refused = RequestRefused(f"there is no {request.method} {request.path} here, only {known}", status=error.status)
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    told = {"message": str(refused), "type": kind, "param": refused.param, "code": None}
    return web.json_response({"error": told}, status=refused.status)


async def close_server(runner: web.AppRunner, *listening: socket.socket) -> None:
    """Close a server and the sockets at which it listens."""
    # closing a server leaks a connection that was accepted in this cycle of the loop (CPython issue 109564)
    for each in listening:
        asyncio.get_running_loop().remove_reader(each)
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


def _completion(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """A reply as OpenAI's object. Its usage is 0: the trajectory has the tokens."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.message.tool_calls
    ]
    message = {"role": "assistant", "content": reply.message.text or (None if calls else "")}
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model or MODEL,
        "choices": [
            {
                "index": 0,
                "message": {**message, "tool_calls": calls} if calls else message,
                "finish_reason": "tool_calls" if calls and reply.finish is FinishReason.STOP else str(reply.finish),
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def _events(completion: Mapping[str, Any], *, usage: bool) -> Iterator[str]:
    """A completion as the chunks of a stream: the whole message at once, then why it ended."""
    head = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    (choice,) = completion["choices"]
    calls = choice["message"].get("tool_calls", ())
    delta = {**choice["message"], "tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}
    if not calls:
        del delta["tool_calls"]
    for part, reason in ((delta, None), ({}, choice["finish_reason"])):
        yield json.dumps({**head, "choices": [{"index": 0, "delta": part, "finish_reason": reason}]})
    if usage:
        yield json.dumps({**head, "choices": [], "usage": completion["usage"]})
    yield "[DONE]"
