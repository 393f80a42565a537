"""HTTP calls of model servers: time limits, bounded answers, and which failures a retry may cure.

A server that cannot be reached, fails (5xx) or is busy (429) raises ``ServerUnreachable``, and the call may be retried;
any other refusal (4xx) raises ``SamplerError``: a retry would be refused too.
"""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import aiohttp

from condensegrpo.core.credentials import REMOVED, redacted
from condensegrpo.core.errors import SamplerError, ServerUnreachable

T = TypeVar("T")
Json = dict[str, Any]  # a parsed body
Body = Mapping[str, object] | None  # of a request
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
MAX_BYTES = 64 << 20  # of an answer
SHOWN = 500  # characters of what a server says in a message
IDLE_SECONDS = 2.0  # that an idle connection is kept; servers drop theirs after 5, possibly during a request


class HttpClient:
    """The calls of one server. Use it, and close it, in one event loop."""

    def __init__(self, url: str, key: str, *, key_advice: str, route_advice: str, trust_env: bool = False) -> None:
        """Connect at the first call.

        Args:
            key: a bearer token, empty for none.
            key_advice, route_advice: what to do where the server refuses key or route.
            trust_env: use the proxies of the environment.
        """
        self.url, self._key = url.rstrip("/"), key
        self._key_advice, self._route_advice = key_advice, route_advice
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            trust_env=trust_env,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),  # 0: no limit
        )

    async def call(
        self, verb: str, route: str, body: Body, seconds: float, headers: Mapping[str, str] = NO_HEADERS
    ) -> Json:
        """The object that a server answers; raises as ``exchange`` and ``read``."""
        return self.read(route, *await self.exchange(verb, route, body, seconds, headers))

    async def exchange(
        self, verb: str, route: str, body: Body, seconds: float, headers: Mapping[str, str] = NO_HEADERS
    ) -> tuple[int, str]:
        """Status and text of an answer. ServerUnreachable: there is none; SamplerError: it is too long."""
        where = f"asking {self.url}{route}: "
        content = None if body is None else io.BytesIO(json.dumps(body).encode())  # sent in pieces, as large ones must
        sent = {**headers, **({} if body is None else {"Content-Type": "application/json"})}
        limit = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(
                verb, self.url + route, data=content, headers=sent, timeout=limit, allow_redirects=False
            ) as answer:
                await answer.content.readexactly(MAX_BYTES + 1)
        except asyncio.IncompleteReadError as whole:
            return answer.status, whole.partial.decode("utf-8", "replace")
        except TimeoutError as error:
            raise ServerUnreachable(f"{where}no answer within {seconds:g} seconds") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachable(f"{where}{type(error).__name__}: {error}") from error
        raise SamplerError(f"{where}the answer exceeds {MAX_BYTES >> 20} MiB")

    def read(self, route: str, status: int, text: str) -> Json:
        """The object in an answer. ServerUnreachable: 429 or 5xx; SamplerError: another refusal, or no object."""
        where = f"asking {self.url}{route}: "
        said = reason(text.replace(self._key, REMOVED) if self._key else text)
        if status == 429 or status >= 500:
            raise ServerUnreachable(f"{where}{status}: {said}")
        if 300 <= status < 400:
            raise SamplerError(f"{where}{status}, a redirect, which is refused. {self._route_advice}")
        if status in (401, 403):
            raise SamplerError(f"{where}{status}, refused: {said}. {self._key_advice}")
        if status == 404:
            raise SamplerError(f"{where}404, not found: {said}. {self._route_advice}")
        if status != 200:
            raise SamplerError(f"{where}{status}: {said}")
        try:
            parsed = json.loads(text or "{}")
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise SamplerError(f"{where}found {said[:80]!r}, wanted a JSON object. {self._route_advice}")
        return parsed

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


async def retried(call: Callable[[], Awaitable[T]], *, retries: int, pause: float) -> T:
    """The result of the first attempt that does not raise ``ServerUnreachable``; SamplerError if all do.

    ``pause`` is doubled from each retry to the next, in seconds.
    """
    attempt = 0
    while True:
        try:
            return await call()
        except ServerUnreachable as error:
            if not retries:
                raise SamplerError(str(error)) from error
            if attempt == retries:
                raise SamplerError(f"sampling a reply: {retries + 1} attempts failed; the last: {error}") from error
        await asyncio.sleep(pause * 2**attempt)
        attempt += 1


def reason(text: str) -> str:
    """The message of an OpenAI-style error, or the whole text."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text
    # redacted before it is cut: half a credential would not be known as one
    return redacted(str(message).strip()[: 2 * SHOWN])[:SHOWN] or "it gave no reason"
