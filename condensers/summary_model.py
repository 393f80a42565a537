"""The condenser for which another model writes the summary: a local one, or one behind an endpoint."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated

from annotated_types import Ge, Gt

from condensegrpo.condensers.endpoint import Endpoint
from condensegrpo.condensers.instruction import Instruction
from condensegrpo.condensers.local_model import LocalModel
from condensegrpo.condensers.summarising import SummaryPlan, planned, summarised, usable, without
from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.messages import History, Message, Summary, flatten
from condensegrpo.core.protocols import Budget, Condensed, Written

CACHED = 4096  # summaries that are remembered
PATIENCE = 0.9  # share of the time that a condenser has in which the summary must have come
COUNTS = ("calls", "remembered", "refused", "seconds")


class SummaryModel:
    """Keeps the newest units; for all before them stands a summary that another model writes. It is not trained.

    The model is sent the conversation as text, and then what ``summary`` asks the policy. What it says is remembered by
    content, and only once it was used. Where it answers too late, not at all, with an error or with what cannot be
    used, old results are masked instead: an error never stands as a summary.
    """

    def __init__(
        self,
        model: str,
        url: str | None = None,
        *,
        keep_last: Annotated[int, Ge(1)] = 1,
        max_tokens: Annotated[int, Ge(1)] = 256,
        always: bool = False,
        template: str | None = None,
        seconds: Annotated[float, Gt(0)] = 60.0,
        concurrency: Annotated[int, Ge(1)] = 4,
        key_variable: str | None = None,
        device: str = "cpu",
    ) -> None:
        """Who writes, and how long it may take. Nothing is loaded or asked before the first summary.

        Args:
            model: a folder or Hub id; with ``url``, the model's name at the endpoint.
            url: of an OpenAI-compatible endpoint, such as ``http://localhost:8000/v1``; None: a local model.
            keep_last: units that stay as they are, at least 1; fewer if they leave a summary no room.
            max_tokens: of a summary, by the tokenizer of the model that writes it.
            always: summarise within the budget too, as soon as there is something new.
            template: a text file with ``$tokens`` and ``$kept``; None: ``summary.txt`` of the package.
            seconds: that one summary may take, waiting for its turn not counted; nobody waits longer than the engine
                waits for a condenser (``rollout.limits.turn_seconds``).
            concurrency: requests to the endpoint at one time. A local model writes one at a time.
            key_variable: name of the environment variable that holds the endpoint's key; None: it needs none.
            device: of a local model.
        """
        self._keep_last, self._max_tokens, self._always = keep_last, max_tokens, always
        self._instruction = Instruction.read(template)
        self._writer: Endpoint | LocalModel = (
            LocalModel(model, device=device, seconds=seconds)
            if url is None
            else Endpoint(url, model, key_variable=key_variable, seconds=seconds, concurrency=concurrency)
        )
        self._known: OrderedDict[str, Written] = OrderedDict()
        self._counts = dict.fromkeys(COUNTS, 0.0)

    def check_room(self, pinned: Sequence[Message], budget: Budget) -> None:
        """Refuse a local model that is not there, and a budget without room even for a summary that says nothing."""
        self._writer.check()
        need = budget.count((*pinned, *Summary(text="", through=0, tokens=0).unit.messages))
        if need > budget.tokens:
            raise ValueError(
                f"behind system message and question an empty summary makes {need} tokens, of {budget.tokens} that a "
                f"condensed prompt may have. Raise rollout.limits.max_context_tokens to more than that"
            )

    def counts(self) -> Mapping[str, float]:
        """Calls of the model, answers from memory, refusals and seconds, since the last time it was asked."""
        found, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        return found

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The newest units under a summary; as they stand if they are within the budget."""
        room = min(self._max_tokens, budget.tokens // 2)
        plan = planned(history, budget, keep_last=self._keep_last, room=room, always=self._always)
        if plan is None:
            return await without(history, budget, tools, why="")
        text = self._asked(plan, history)
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        try:
            written = self._known[key] if key in self._known else await self._write(text, budget.seconds)
            summary = usable(written, plan, history, budget)
        except SummaryRefused as refusal:
            self._counts["refused"] += 1
            return await without(history, budget, tools, why=f"no summary can be used: {refusal}")
        self._remember(key, written)
        return summarised(summary, plan, history, budget, ())

    async def _write(self, text: str, seconds: float | None) -> Written:
        """Ask, and give up before the engine does, for then the trajectory would be lost and not a summary."""
        started = time.monotonic()
        self._counts["calls"] += 1
        work = self._writer.write(text, self._max_tokens)
        try:
            return await asyncio.wait_for(work, None if seconds is None else PATIENCE * seconds)
        except TimeoutError as error:
            raise SummaryRefused("its turn did not come, or end, in time: raise concurrency or seconds") from error
        finally:
            self._counts["seconds"] += time.monotonic() - started

    def _remember(self, key: str, written: Written) -> None:
        self._counts["remembered"] += key in self._known
        self._known[key] = written
        self._known.move_to_end(key)
        while len(self._known) > CACHED:
            self._known.popitem(last=False)

    def _asked(self, plan: SummaryPlan, history: History) -> str:
        spoken = [_spoken(message) for message in flatten(history.pinned, plan.covered)]
        asked = self._instruction.filled(tokens=self._max_tokens, kept=len(plan.kept))
        return "\n\n".join((*spoken, asked))


def _spoken(message: Message) -> str:
    return f"[{message.name or message.role}]\n{message.content}"
