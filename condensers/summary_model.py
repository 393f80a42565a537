"""The condenser for which another model writes the summary: a local model, or a model behind an endpoint."""

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

CACHED = 4096  # summaries in the cache
PATIENCE = 0.9  # share of the condenser's time limit that a summary may take
COUNTS = ("calls", "remembered", "refused", "seconds")


class SummaryModel:
    """Keeps the newest units and replaces all earlier units by a summary that another model writes. It is not trained.

    The model gets the conversation as text and the instruction that ``summary`` gives the policy. A used summary is
    cached by its request. If the reply is late, missing, an error or unusable, old results are masked instead: an
    error text never becomes a summary.
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
        """Choose the model and its limits. Nothing is loaded or requested before the first summary.

        Args:
            model: a folder or Hub id; with ``url``, the model's name at the endpoint.
            url: of an OpenAI-compatible endpoint, such as ``http://localhost:8000/v1``; None: a local model.
            keep_last: units that stay verbatim; fewer if they leave a summary no room.
            max_tokens: maximum length of a summary, by the tokenizer of the model that writes it.
            always: summarise within the budget too, as soon as there is something new.
            template: a text file with ``$tokens`` and ``$kept``; None: ``summary.txt`` of the package.
            seconds: time limit of one summary, without the wait for a free slot. The engine's
                ``rollout.limits.turn_seconds`` applies to both together.
            concurrency: open requests to the endpoint at one time. A local model writes one summary at a time.
            key_variable: name of the environment variable that holds the endpoint's key; None: no key.
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
        room = min(self._max_tokens, budget.tokens // 2)
        plan = planned(history, budget, keep_last=self._keep_last, room=room, always=self._always)
        if plan is None:
            return await without(history, budget, tools, why="")
        text = self._request(plan, history)
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
        """Request a summary, and time out before the engine does: that would end the trajectory."""
        started = time.monotonic()
        self._counts["calls"] += 1
        work = self._writer.write(text, self._max_tokens)
        try:
            return await asyncio.wait_for(work, None if seconds is None else PATIENCE * seconds)
        except TimeoutError as error:
            raise SummaryRefused("it waited or ran too long: raise concurrency or seconds") from error
        finally:
            self._counts["seconds"] += time.monotonic() - started

    def _remember(self, key: str, written: Written) -> None:
        self._counts["remembered"] += key in self._known
        self._known[key] = written
        self._known.move_to_end(key)
        while len(self._known) > CACHED:
            self._known.popitem(last=False)

    def _request(self, plan: SummaryPlan, history: History) -> str:
        spoken = [_spoken(message) for message in flatten(history.pinned, plan.covered)]
        instruction = self._instruction.filled(tokens=self._max_tokens, kept=len(plan.kept))
        return "\n\n".join((*spoken, instruction))


def _spoken(message: Message) -> str:
    return f"[{message.name or message.role}]\n{message.content}"
