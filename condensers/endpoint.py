"""An OpenAI-compatible endpoint that writes summaries. Every way in which it can fail is one typed refusal."""

import asyncio
import io
import json
import os
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout

from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.protocols import Written
from condensegrpo.core.trajectory import Finish

MAX_BYTES = 4_000_000  # of an answer; more is no summary


class Endpoint:
    """``POST <url>/chat/completions`` with one user message."""

    def __init__(self, url: str, model: str, *, key_variable: str | None, seconds: float, concurrency: int) -> None:
        """Set the address.

        Args:
            url: such as ``http://localhost:8000/v1``.
            model: the model's name at the endpoint.
            key_variable: name of the environment variable that holds the key; None: no key is sent.
            seconds: time limit of one request; the wait for a free slot is not included.
            concurrency: open requests at one time, in each event loop.

        Raises:
            ValueError: the URL is not http or https, or the environment variable of the key is not set.
        """
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ValueError(f"url is {url!r}, wanted the URL of an endpoint such as http://localhost:8000/v1")
        if key_variable is not None and not os.environ.get(key_variable):
            raise ValueError(f"the environment variable {key_variable} (key_variable) is not set")
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._key_variable = key_variable
        self._seconds = seconds
        self._concurrency = concurrency
        # a semaphore belongs to one event loop, and every step of a run has its own
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def check(self) -> None:
        """Check nothing: an endpoint may start later than the run."""

    async def write(self, text: str, max_tokens: int) -> Written:
        """The model's reply to a text.

        Raises:
            SummaryRefused: the endpoint did not answer in time, or answered with an error or without a text.
        """
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._concurrency))
        async with slots:
            try:
                return _written(await self._answer(text, max_tokens))
            except TimeoutError as error:  # before ClientError: some of aiohttp's errors are both
                raise SummaryRefused(f"the endpoint did not answer within {self._seconds:g} seconds") from error
            except (ClientError, OSError) as error:
                raise SummaryRefused(f"the endpoint cannot be reached: {error}") from error

    async def _answer(self, text: str, max_tokens: int) -> bytes:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        headers = {"Content-Type": "application/json"}
        if self._key_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ[self._key_variable]}"
        content = io.BytesIO(json.dumps(body).encode())  # sent in pieces; aiohttp warns of large bodies in one
        async with (
            ClientSession(timeout=ClientTimeout(total=self._seconds), headers=headers, trust_env=True) as session,
            session.post(self._url, data=content) as response,
        ):
            if not response.ok:
                raise SummaryRefused(f"the endpoint answered HTTP {response.status} {response.reason}")
            return await _read(response)


async def _read(response: ClientResponse) -> bytes:
    try:
        await response.content.readexactly(MAX_BYTES + 1)
    except asyncio.IncompleteReadError as answer:
        return answer.partial
    raise SummaryRefused(f"the endpoint answered more than {MAX_BYTES} bytes")


def _written(answer: bytes) -> Written:
    """The text of an answer; an answer that is no completion is an error, whatever its HTTP status."""
    try:
        choice = json.loads(answer)["choices"][0]
        text, finish = choice["message"]["content"], choice["finish_reason"]
    except (ValueError, LookupError, TypeError) as error:
        shown = answer[:80].decode("utf-8", "replace")
        raise SummaryRefused(f"the endpoint answered no completion but {shown!r}") from error
    if not isinstance(text, str):
        raise SummaryRefused("the endpoint answered no text")
    return Written(text=text, finish=Finish.STOP if finish == "stop" else Finish.LENGTH)
