"""Sessions with OpenEnv servers, by their wire format: JSON messages over a WebSocket, answered in order.

    ─▶  {"type": "reset", "data": {"seed": 3}}
    ◀─  {"type": "observation", "data": {"observation": {"text": "Guess."}, "reward": null, "done": false}}
    ─▶  {"type": "step", "data": {"guess": "five"}}
    ◀─  {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": […]}}

A session has an environment of its own on the server. The format is that of versions 0.2 to 0.10; the library is not
needed, so that servers of any of them can be used beside any other package. All coroutines run on one event loop.
"""

import asyncio
import contextlib
import json
from collections import deque

import aiohttp

from condensegrpo.core.credentials import redacted
from condensegrpo.core.errors import EnvironmentLost
from condensegrpo.integrations.mcp_client import TOO_LONG, Json, Refused, give_up
from condensegrpo.integrations.servers import END_SECONDS, SHOWN

FULL = "CAPACITY_REACHED"
ENDS = {FULL, "FACTORY_ERROR", "SESSION_ERROR"}  # errors after which the server ends a session
INVALID = "VALIDATION_ERROR"
EXPECTED = "wanted the messages of OpenEnv 0.2 or newer"


class InvalidAction(Refused):
    """The server refused an action that its schema does not allow."""


class NotReady(EnvironmentLost):
    """The server cannot be reached now, or ended the session. Another attempt may succeed."""


class ServerFull(NotReady):
    """All sessions of the server are in use."""


class Session:
    """An environment on a server. What it pays counts, also for a step whose caller gave up."""

    def __init__(self, name: str, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        """``name``: of the server, for messages."""
        self.rewards = list[float]()  # of its steps, those that had one
        self.done = False  # whether the environment ended the episode
        self._name, self._socket = name, socket
        self._lost: EnvironmentLost | None = None  # why it can be used no longer
        self._waiting = deque[asyncio.Future[Json]]()  # for answers, in order
        self._reader = asyncio.create_task(self._listen())  # always there: it also answers the server's pings

    async def request(self, kind: str, data: Json) -> Json:
        """The observation that follows from a ``reset`` or ``step``."""
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        try:
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # the reader has the reason
                await self._socket.send_str(json.dumps({"type": kind, "data": data}, default=str))
            return await answer
        finally:
            give_up(answer)  # where it was not awaited to its end

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
                self._take(message.data)
        except EnvironmentLost as error:
            lost = error
        finally:
            self._lost = lost
            for answer in self._waiting:
                if not answer.done():
                    answer.set_exception(type(lost)(str(lost)))

    def _take(self, text: object) -> None:
        """Take the answer to the request that waits longest."""
        try:
            message = json.loads(text if isinstance(text, str) else "null")
            data = message["data"]
            if message["type"] == "error":
                errors = data.get("errors") or ()  # what is wrong with which part of the action
                details = "".join(f"; {'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors)
                self._refuse(data.get("code"), redacted(f"{data['message']}{details}")[:SHOWN])
                return
            observation, reward, done = dict(data["observation"]), data["reward"], bool(data["done"])
            if reward is not None and not self.done:
                self.rewards.append(float(reward))
            self.done = self.done or done
            answer = self._waiting.popleft()
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            shown = redacted(text)[:SHOWN] if isinstance(text, str) else "binary data"
            raise EnvironmentLost(f"the OpenEnv server {self._name} sent {shown}, {EXPECTED}") from error
        if not answer.done():  # else its caller gave up
            answer.set_result(observation)

    def _refuse(self, code: object, fault: str) -> None:
        if code in ENDS:
            raise (ServerFull if code == FULL else EnvironmentLost)(f"the OpenEnv server {self._name}: {fault}")
        answer = self._waiting.popleft()
        if not answer.done():
            answer.set_exception((InvalidAction if code == INVALID else Refused)(fault))
