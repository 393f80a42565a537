"""An OpenAI-compatible endpoint that writes summaries. Every way in which it can fail is one typed refusal."""

import asyncio
import io
import json
import os
from dataclasses import dataclass
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout

from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.protocols.condenser import Written
from condensegrpo.core.trajectory import Finish

MAX_BYTES = 4_000_000  # of an answer; more is no summary


@dataclass(eq=False, kw_only=True)
class Endpoint:
    """``POST <url>/chat/completions`` with one user message."""

    url: str  # such as http://localhost:8000/v1
    model: str  # the model's name at the endpoint
    key_variable: str | None  # name of the environment variable that holds the key; None: no key is sent
    seconds: float  # time limit of one request; the wait for a free slot is not included
    concurrency: int  # open requests at one time, in each event loop
    max_tokens: int  # of a reply

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            raise ValueError(f"url is {self.url!r}, wanted the URL of an endpoint such as http://localhost:8000/v1")
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            raise ValueError(f"the environment variable {self.key_variable} (key_variable) is not set")
        # a semaphore belongs to one event loop, and every step of a run has its own
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def check(self) -> None:
        """Check nothing: an endpoint may start later than the run."""

    async def write(self, text: str) -> Written:
        """The model's reply to a text.

        Raises:
            SummaryRefused: the endpoint did not answer in time, or answered with an error or without a text.
        """
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))
        async with slots:
            try:
                return _written(await self._answer(text))
            except TimeoutError as error:  # before ClientError: some of aiohttp's errors are both
                raise SummaryRefused(f"the endpoint did not answer within {self.seconds:g} seconds") from error
            except (ClientError, OSError) as error:
                raise SummaryRefused(f"the endpoint cannot be reached: {error}") from error

    async def _answer(self, text: str) -> bytes:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        headers = {"Content-Type": "application/json"}
        if self.key_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.key_variable]}"
        content = io.BytesIO(json.dumps(body).encode())  # sent in pieces; aiohttp warns of large bodies in one
        async with (
            ClientSession(timeout=ClientTimeout(total=self.seconds), headers=headers, trust_env=True) as session,
            session.post(f"{self.url.rstrip('/')}/chat/completions", data=content) as response,
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
