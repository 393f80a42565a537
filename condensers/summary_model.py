"""The condenser for which another model writes the summary: a local model, or a model behind an endpoint."""

import asyncio
import hashlib
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout
from annotated_types import Ge, Gt

from condensegrpo.condensers.local_model import LocalModel
from condensegrpo.condensers.summarising import (
    SummaryPlan,
    read_instruction,
    summarised,
    summary_plan,
    usable,
    without_summary,
)
from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.messages import History, Message, Summary, flatten
from condensegrpo.core.protocols.condenser import Budget, Condensed, WrittenSummary
from condensegrpo.core.request_queue import SharedResults
from condensegrpo.core.trajectory import FinishReason

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

    async def write(self, text: str) -> WrittenSummary:
        """The model's reply to a text; a SummaryRefused if the endpoint gives none in time."""
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


def _written(answer: bytes) -> WrittenSummary:
    """The text of an answer; an answer that is no completion is an error, whatever its HTTP status."""
    try:
        choice = json.loads(answer)["choices"][0]
        text, finish = choice["message"]["content"], choice["finish_reason"]
    except (ValueError, LookupError, TypeError) as error:
        shown = answer[:80].decode("utf-8", "replace")
        raise SummaryRefused(f"the endpoint answered no completion but {shown!r}") from error
    if not isinstance(text, str):
        raise SummaryRefused("the endpoint answered no text")
    return WrittenSummary(text=text, finish=FinishReason.STOP if finish == "stop" else FinishReason.LENGTH)


CACHED = 4096  # summaries in the cache
PATIENCE = 0.9  # share of the condenser's time limit that a summary may take
COUNTS = ("calls", "remembered", "refused", "seconds")


@dataclass(eq=False)
class SummaryModel:
    """Keeps the newest units and replaces all earlier units by a summary that another model writes. It is not trained.

    The model gets the conversation as text and the instruction that ``summary`` gives the policy. A used summary is
    cached by its request, and trajectories that make the same request at the same time share one call. If the reply is
    late, missing, an error or unusable, old results are masked instead: an error text never becomes a summary. Nothing
    is loaded or requested before the first summary.
    """

    model: str  # a folder or Hub id; with ``url``, the model's name at the endpoint
    url: str | None = None  # of an OpenAI-compatible endpoint, such as http://localhost:8000/v1; None: a local model
    _: KW_ONLY
    keep_last: Annotated[int, Ge(1)] = 1  # units that stay verbatim; fewer if they leave a summary no room
    max_tokens: Annotated[int, Ge(1)] = 256  # of a summary, by the tokenizer of the model that writes it
    always: bool = False  # summarise within the budget too, whenever a unit is new
    template: str | None = None  # a text file with $tokens and $kept; None: summary.txt of the package
    seconds: Annotated[float, Gt(0)] = 60.0  # per summary, without the wait for a slot; turn_seconds covers both
    concurrency: Annotated[int, Ge(1)] = 4  # open requests to the endpoint; a local model writes in batches
    key_variable: str | None = None  # environment variable with the endpoint's key; None: no key
    device: str = "cpu"  # of a local model

    def __post_init__(self) -> None:
        self._instruction = read_instruction(self.template)
        self._writer: Endpoint | LocalModel = (
            LocalModel(model=self.model, device=self.device, seconds=self.seconds, max_tokens=self.max_tokens)
            if self.url is None
            else Endpoint(
                url=self.url,
                model=self.model,
                key_variable=self.key_variable,
                seconds=self.seconds,
                concurrency=self.concurrency,
                max_tokens=self.max_tokens,
            )
        )
        self._summaries: SharedResults[str, WrittenSummary] = SharedResults(CACHED)
        self._counts = dict.fromkeys(COUNTS, 0.0)

    def check_room(self, pinned: Sequence[Message], budget: Budget) -> None:
        """Refuse a local model that does not exist, and a budget without room even for an empty summary."""
        self._writer.check()
        need = budget.count((*pinned, *Summary(text="", through=0, tokens=0).unit.messages))
        if need > budget.tokens:
            raise ValueError(
                f"behind system message and question an empty summary makes {need} tokens, of {budget.tokens} that a "
                f"condensed prompt may have. Raise rollout.limits.max_context_tokens to more than that"
            )

    def counts(self) -> Mapping[str, float]:
        """Calls of the model, summaries from the cache, refusals and seconds, since the last call of this method."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        return counts

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The newest units behind a summary; the units unchanged if they are within the budget."""
        room = min(self.max_tokens, budget.tokens // 2)
        plan = summary_plan(history, budget, keep_last=self.keep_last, room=room, always=self.always)
        if plan is None:
            return await without_summary(history, budget, tools, why="")
        text = self._request(plan, history)
        key = hashlib.sha256(text.encode()).hexdigest()
        known = key in self._summaries
        try:  # and time out before the engine does: that would end the trajectory
            async with asyncio.timeout(None if budget.seconds is None else PATIENCE * budget.seconds):
                written = await self._summaries.get(key, partial(self._write, text))
            summary = usable(written, plan, history, budget)
        except (SummaryRefused, TimeoutError) as error:
            self._summaries.forget(key)
            self._counts["refused"] += 1
            late = "it waited or ran too long: raise concurrency or seconds"
            refusal = error if isinstance(error, SummaryRefused) else late
            return await without_summary(history, budget, tools, why=f"no summary can be used: {refusal}")
        self._counts["remembered"] += known
        return summarised(summary, plan, history, budget, ())

    async def _write(self, text: str) -> WrittenSummary:
        """Request a summary."""
        started = time.monotonic()
        self._counts["calls"] += 1
        try:
            return await self._writer.write(text)
        finally:
            self._counts["seconds"] += time.monotonic() - started

    def _request(self, plan: SummaryPlan, history: History) -> str:
        messages = flatten(history.pinned, plan.covered)
        conversation = [f"[{message.name or message.role}]\n{message.text}" for message in messages]
        instruction = self._instruction.substitute(tokens=self.max_tokens, kept=len(plan.kept))
        return "\n\n".join((*conversation, instruction))
