"""Connections to servers of the Model Context Protocol, by its wire format: JSON-RPC over pipes or streamable HTTP.

No SDK is needed, so that servers of any version can be used beside any other package. The handshake offers ``VERSION``;
newer servers accept it, and older ones answer with theirs (https://modelcontextprotocol.io/specification/2025-06-18).

    with a command     ─▶  {"jsonrpc": "2.0", "id": 3, "method": "tools/call", …}      a line of its stdin
                       ◀─  {"jsonrpc": "2.0", "id": 3, "result": {"content": […]}}     a line of its stdout
    with an address    ─▶  POST, answered by JSON or by a stream of events that holds the answer

All coroutines of a connection run on one event loop.
"""

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

import aiohttp

from condensegrpo.core.credentials import redacted
from condensegrpo.core.errors import EnvironmentLost
from condensegrpo.integrations.servers import CHUNK, END_SECONDS, SHOWN, ChildProcess

VERSION = "2025-06-18"
MAX_BYTES = 16 * 2**20  # of one message, decompressed; a longer one is refused, on a pipe once it was read to its end
# after which a connection is not used again: uvicorn and Node.js close theirs after 5 s, and what is sent then is lost
IDLE_SECONDS = 2.0
LINE_COST = 64  # bytes that an empty line counts as: it takes as long to read
TOO_LONG = f"its answer exceeds {MAX_BYTES >> 20} MiB"
Json = Mapping[str, Any]
_ID = re.compile(rb'"id"\s*:\s*(\d+)\s*[,}]')
_NUMBERS = itertools.count(1)


class Refused(Exception):
    """The server answered a request with an error, or with something that cannot be used."""


class ProcessConnection:
    """A server that is a child process, with which several requests may be under way."""

    def __init__(self, name: str, process: ChildProcess) -> None:
        """``name``: of the server, for messages."""
        self.lost = ""  # why it can be used no longer; empty: it can
        self._name, self._process = name, process
        self._waiting = dict[int, asyncio.Future[Json]]()
        self._reader = asyncio.create_task(self._listen())

    async def request(self, method: str, parameters: Json) -> Json:
        """The result of a request."""
        number = next(_NUMBERS)
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._send({"id": number, "method": method, "params": parameters})
            return _result_of(await answer)
        except asyncio.CancelledError:
            with contextlib.suppress(EnvironmentLost):
                await self.notify("notifications/cancelled", {"requestId": number})
            raise
        finally:
            del self._waiting[number]
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # that came too late: unread, Python would report it at the exit

    async def notify(self, method: str, parameters: Json) -> None:
        """Send a message that has no answer."""
        await self._send({"method": method, "params": parameters})

    async def close(self) -> None:
        """End the process group."""
        self.lost = self.lost or f"the MCP server {self._name} was closed"
        await self._process.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _send(self, message: Json) -> None:
        if self.lost:
            raise EnvironmentLost(self.lost)
        try:
            self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            await self._process.stdin.drain()
        except OSError as error:
            await self._ended()
            raise EnvironmentLost(self.lost) from error

    async def _listen(self) -> None:
        async for line, whole in lines_of(self._process.stdout):
            if not whole:
                self._refuse(line)
                continue
            with contextlib.suppress(ValueError, RecursionError):  # a line that the server printed for people
                message = json.loads(line)
                if not isinstance(message, dict):
                    continue
                if reply := _reply_to(message):
                    await self._send(reply)
                elif isinstance(message.get("id"), int) and message["id"] in self._waiting:
                    self._answer({message["id"]}, message)
        await self._ended()

    def _refuse(self, line: bytes) -> None:
        """Refuse the request that a line which was too long answers; every one that waits if it does not say."""
        numbers = {int(number) for number in _ID.findall(line[:200]) + _ID.findall(line[-200:])}
        self._answer(numbers & self._waiting.keys() or self._waiting.keys(), Refused(TOO_LONG))

    async def _ended(self) -> None:
        """Tell everyone who waits why there will be no answer."""
        how = await self._process.described_end()
        self.lost = self.lost or f"the MCP server {self._name} {how}"
        self._answer(self._waiting.keys(), EnvironmentLost(self.lost))

    def _answer(self, numbers: Collection[int], answer: Json | Exception) -> None:
        for waiting in (self._waiting[number] for number in numbers):
            if not waiting.done():
                waiting.set_exception(answer) if isinstance(answer, Exception) else waiting.set_result(answer)


class HttpConnection:
    """A server at an address. Requests share pooled connections; the server may name a session for them."""

    def __init__(self, name: str, url: str, headers: Mapping[str, str]) -> None:
        """``name``: of the server, for messages."""
        self.lost = ""  # why it can be used no longer; empty: it can
        self._name, self._url = name, url
        accepted = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": VERSION}
        self._headers = {**accepted, **headers}
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),  # as many as there are requests
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )

    async def request(self, method: str, parameters: Json) -> Json:
        """The result of a request, see ``ProcessConnection``."""
        number = next(_NUMBERS)
        async with self._posted({"id": number, "method": method, "params": parameters}) as response:
            if "Mcp-Session-Id" in response.headers:
                self._headers["Mcp-Session-Id"] = response.headers["Mcp-Session-Id"]
            async for message in messages_of(response):
                if reply := _reply_to(message):
                    await self._post(reply)
                elif message.get("id") == number:
                    return _result_of(message)
        raise Refused("its answer holds no result")

    async def notify(self, method: str, parameters: Json) -> None:
        """Send a message that has no answer."""
        await self._post({"method": method, "params": parameters})

    async def close(self) -> None:
        """End the session."""
        if "Mcp-Session-Id" in self._headers and not self.lost:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with asyncio.timeout(END_SECONDS), self._client.delete(self._url, headers=self._headers):
                    pass
        self.lost = self.lost or f"the connection to the MCP server {self._name} was closed"
        await self._client.close()

    async def _post(self, message: Json) -> None:
        async with self._posted(message):
            pass

    @contextlib.asynccontextmanager
    async def _posted(self, message: Json) -> AsyncIterator[aiohttp.ClientResponse]:
        if self.lost:
            raise EnvironmentLost(self.lost)
        try:
            async with self._client.post(
                self._url, json={"jsonrpc": "2.0", **message}, headers=self._headers, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    page = (await response.content.read(2 * SHOWN)).decode(errors="replace")  # none is cut and shown
                    fault = f"the MCP server {self._name} answered {response.status}: {redacted(page)[:SHOWN]}"
                    unknown = response.status == 404 or (response.status == 400 and "session" in page.lower())
                    if unknown and "Mcp-Session-Id" in self._headers:
                        self.lost = fault  # it knows the session no longer; many servers answer 400 then
                    raise EnvironmentLost(fault)
                yield response
        except (aiohttp.ClientError, OSError) as error:
            self.lost = redacted(f"the MCP server {self._name} cannot be reached: {type(error).__name__}: {error}")
            raise EnvironmentLost(self.lost) from error


Connection = ProcessConnection | HttpConnection  # a session with one server


async def lines_of(
    stream: asyncio.StreamReader | aiohttp.StreamReader, *, to_end: bool = True
) -> AsyncIterator[tuple[bytes, bool]]:
    """The lines of a stream, and whether each is whole: of one longer than ``MAX_BYTES`` the middle is left out.

    ``to_end``: read on after such a line.
    """
    pieces, size, tail = list[bytes](), 0, b""
    while chunk := await stream.read(CHUNK):
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join((*pieces, end if size <= MAX_BYTES else tail + end)), size + len(end) <= MAX_BYTES
            pieces, size, tail = [], 0, b""
        if size <= MAX_BYTES:
            pieces.append(rest)
        else:
            tail = (tail + rest)[-CHUNK:]
        size += len(rest)
        if size > MAX_BYTES and not to_end:
            break
    if size:
        yield b"".join((*pieces, tail)), size <= MAX_BYTES


async def messages_of(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The messages of a response: one of JSON, or those of a stream of events."""
    if response.content_type != "text/event-stream":
        try:
            await response.content.readexactly(MAX_BYTES + 1)
        except asyncio.IncompleteReadError as whole:
            if whole.partial:
                yield _message(whole.partial)
            return
        raise Refused(TOO_LONG)
    data, size = list[bytes](), 0
    async for line, whole_line in lines_of(response.content, to_end=False):
        size += len(line) + LINE_COST
        if not whole_line or size > MAX_BYTES:
            raise Refused(TOO_LONG)
        if line.startswith(b"data:"):
            data.append(line.removeprefix(b"data:"))
        elif not line.strip() and data:
            yield _message(b"\n".join(data))
            data, size = [], 0
    if data:
        yield _message(b"\n".join(data))


def _message(text: bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"its answer is no JSON: {redacted(text.decode(errors='replace'))[:SHOWN]}") from error
    if not isinstance(message, dict):
        raise Refused(redacted(f"its answer is {message!r:.80}, wanted an object"))
    return message


def _reply_to(message: Json) -> Json | None:
    """The reply to a request of the server; None: it is none. It may ask whether we live, and for nothing else."""
    if "method" not in message or "id" not in message:
        return None
    if message["method"] == "ping":
        return {"id": message["id"], "result": {}}
    return {"id": message["id"], "error": {"code": -32601, "message": "this client does not support it"}}


def _result_of(message: Json) -> Json:
    """The result in the answer to a request."""
    error, result = message.get("error"), message.get("result")
    if isinstance(error, dict):
        raise Refused(redacted(str(error.get("message", error))))
    if not isinstance(result, dict):
        raise Refused(f"its result is {result!r:.80}, wanted an object")
    return result
