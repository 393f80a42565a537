"""The oracle scorer: a unit's score is what the newest output loses in probability without it.

It costs one pass per unit: for tests and analysis. Scores are cached by history and weights.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from condensegrpo.attention.scorer import ScoreCache, check_text
from condensegrpo.core.messages import History, flatten
from condensegrpo.core.protocols.sampler import Measures
from condensegrpo.episodes.render import Renderer


class VersionedMeasures(Measures, Protocol):
    """A sampler that measures replies and has a version of its weights."""

    @property
    def version(self) -> int:
        """The optimiser step whose weights are in use."""


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """Scores by the probability of the newest reply, with and without each unit before it."""

    model: VersionedMeasures
    renderer: Renderer  # with that model's tokenizer and chat template
    _cache: ScoreCache = field(default_factory=ScoreCache, init=False)

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        """What the newest reply loses without each unit, in nats, at least 0; 0 for the newest unit itself.

        Prompts are measured whole; ``tokens`` is ignored.
        """
        return await self._cache.scores(histories, 0, self.model.version, self._measured)

    async def _measured(self, history: History) -> tuple[float, ...]:
        if not history.units:
            return ()
        check_text(history)
        before = History(pinned=history.pinned, units=history.units[:-1])
        output = self.renderer.reply_ids(history.units[-1].reply.text)
        return (*(max(loss, 0.0) for loss in await losses(self.model, self.renderer, before, output)), 0.0)


async def losses(model: Measures, renderer: Renderer, history: History, output_ids: Sequence[int]) -> list[float]:
    """What an output loses in log-probability without each unit of its history.

        log π(o | pinned, u_0 … u_n) − log π(o | pinned, u_0 … u_n without u_i),  nats, for every i

    Args:
        output_ids: (A,) as sampled, at least one.
    """

    async def logprob(units: Sequence[int]) -> float:
        shown = flatten(history.pinned, [history.units[index] for index in units])
        return sum(await model.measure(renderer.prompt(shown), output_ids))

    every = range(len(history.units))
    with_all, *without = await asyncio.gather(
        logprob(every), *(logprob([index for index in every if index != left_out]) for left_out in every)
    )
    return [with_all - reduced for reduced in without]
