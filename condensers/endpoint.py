"""An OpenAI-compatible endpoint that writes summaries. Every way in which it can fail is one typed refusal."""

import json
import os
import time
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from urllib.parse import urlsplit

from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.protocols import Written
from condensegrpo.core.trajectory import Finish

MOST_BYTES = 4_000_000  # of an answer; more is no summary


class Endpoint:
    """``POST <url>/chat/completions`` with one user message. Blocking: called from threads."""

    def __init__(self, url: str, model: str, *, key_variable: str | None, seconds: float) -> None:
        """Where to ask.

        Raises:
            ValueError: the URL is not one of http or https, or the variable of the key is not set.
        """
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ValueError(f"url must be one of an endpoint, such as http://localhost:8000/v1, found {url!r}")
        if key_variable is not None and not os.environ.get(key_variable):
            raise ValueError(f"the environment variable {key_variable} (key_variable) is not set")
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._key_variable = key_variable
        self._seconds = seconds

    def check(self) -> None:
        """Nothing: an endpoint may start later than a run."""

    def write(self, text: str, max_tokens: int) -> Written:
        """What the model says to a text.

        Raises:
            SummaryRefused: no answer in time, or one that is an error or none at all.
        """
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        headers = {"Content-Type": "application/json"}
        if self._key_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ[self._key_variable]}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        deadline = time.monotonic() + self._seconds
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as answer:
                return _read(_bytes(answer, deadline))
        except urllib.error.HTTPError as error:
            with error:
                raise SummaryRefused(f"the endpoint answered HTTP {error.code} {error.reason}") from error
        except TimeoutError as error:
            raise SummaryRefused(f"the endpoint did not answer within {self._seconds:g} seconds") from error
        except (OSError, HTTPException) as error:  # an URLError is an OSError
            raise SummaryRefused(f"the endpoint cannot be reached: {error}") from error


def _bytes(answer: HTTPResponse, deadline: float) -> bytes:
    """The whole answer, piece by piece as it comes: the time limit of the connection is that of each piece alone."""
    found = bytearray()
    while piece := answer.read1(65536):
        found += piece
        if len(found) > MOST_BYTES:
            raise SummaryRefused(f"the endpoint answered more than {MOST_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(found)


def _read(answer: bytes) -> Written:
    """The text of an answer; what has not the form of one is an error, whatever its status said."""
    try:
        choice = json.loads(answer)["choices"][0]
        text, finish = choice["message"]["content"], choice["finish_reason"]
    except (ValueError, LookupError, TypeError) as error:
        shown = answer[:80].decode("utf-8", "replace")
        raise SummaryRefused(f"the endpoint answered no completion but {shown!r}") from error
    if not isinstance(text, str):
        raise SummaryRefused("the endpoint answered no text")
    return Written(text=text, finish=Finish.STOP if finish == "stop" else Finish.LENGTH)
