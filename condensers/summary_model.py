"""The condenser for which another model writes the summary: a local model, or a model behind an endpoint."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated

from annotated_types import Ge, Gt

from condensegrpo.condensers.summarising import (
    SummaryPlan,
    empty_summary_tokens,
    read_instruction,
    summarised,
    summary_plan,
    usable,
    without_summary,
)
from condensegrpo.core.condenser import Budget, Condensed, Condenser, Count, TextWriter, WrittenSummary
from condensegrpo.core.errors import SamplerError, SummaryRefused
from condensegrpo.core.messages import History, Message, flatten
from condensegrpo.core.request_queue import SharedResults

CACHED_SUMMARIES = 4096  # summaries in the cache
TIME_SHARE = 0.9  # share of the condenser's time limit that a summary may take
COUNTS = ("calls", "remembered", "refused", "seconds")


@dataclass(eq=False)
class SummaryModel(Condenser):
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
    open_writer: Callable[..., TextWriter] | None = None  # a run supplies it

    def __post_init__(self) -> None:
        self._instruction = read_instruction(self.template)
        if self.open_writer is None:
            raise ValueError("open_writer is None, wanted open_writer of condensegrpo.samplers.writers")
        self._writer = self.open_writer(
            self.model,
            self.url,
            key_variable=self.key_variable,
            seconds=self.seconds,
            concurrency=self.concurrency,
            max_tokens=self.max_tokens,
            device=self.device,
        )
        self._summaries: SharedResults[str, WrittenSummary] = SharedResults(CACHED_SUMMARIES)
        self._counts = dict.fromkeys(COUNTS, 0.0)

    def check(self, pinned: Sequence[Message], budget: Budget, count: Count) -> None:
        """Refuse a local model that does not exist, and a budget without room even for an empty summary."""
        self._writer.check()
        need = empty_summary_tokens(pinned, count)
        if need > budget.tokens:
            raise ValueError(
                f"behind system message and question an empty summary takes {need} tokens, of {budget.tokens} that "
                f"units may have. Raise rollout.limits.max_context_tokens by more than the difference"
            )

    def counts(self) -> Mapping[str, float]:
        """Calls of the model, summaries from the cache, refusals and seconds, since the last call of this method."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        return counts

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The newest units behind a summary; the units unchanged if they are within the budget."""
        room = min(self.max_tokens, budget.tokens // 2)
        plan = summary_plan(history, budget, keep_last=self.keep_last, room=room, always=self.always)
        if plan is None:
            return await without_summary(history, budget, why="")
        text = self._request(plan, history)
        key = hashlib.sha256(text.encode()).hexdigest()
        known = key in self._summaries
        try:  # and time out before the engine does: that would end the trajectory
            async with asyncio.timeout(None if budget.seconds is None else TIME_SHARE * budget.seconds):
                written = await self._summaries.get(key, partial(self._write, text))
            summary = usable(written, plan, history, budget)
        except (SummaryRefused, SamplerError, TimeoutError) as error:
            self._summaries.forget(key)
            self._counts["refused"] += 1
            late = "it waited or ran too long: raise concurrency or seconds"
            refusal = late if isinstance(error, TimeoutError) else error
            return await without_summary(history, budget, why=f"no summary can be used: {refusal}")
        self._counts["remembered"] += known
        return summarised(summary, plan, ())

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
