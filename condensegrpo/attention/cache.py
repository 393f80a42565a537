"""The cache of scorers: scores by the content of a history, the longest prompt and the version of the weights."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from condensegrpo.core.messages import History
from condensegrpo.core.shared_results import SharedResults

CACHED = 4096  # histories whose scores are kept
Compute = Callable[[History], Coroutine[Any, Any, tuple[float, ...]]]


class ScoreKey(NamedTuple):
    """What scores depend on. Equal by content; the hash reads the newest unit only, however long the history is."""

    history: History
    tokens: int  # of the longest prompt
    version: int  # optimiser step of the weights

    def __hash__(self) -> int:
        """Differs where the newest replies differ, which is where trajectories differ."""
        newest = self.history.units[-1].reply.text if self.history.units else ""
        return hash((len(self.history.units), newest, self.tokens, self.version))


@dataclass(slots=True, eq=False)
class ScoreCache:
    """Computes the scores of a history once, also for callers that need them at the same time."""

    _results: SharedResults[ScoreKey, tuple[float, ...]] = field(default_factory=lambda: SharedResults(CACHED))

    async def scores(
        self, histories: Sequence[History], tokens: int, version: int, compute: Compute
    ) -> Sequence[Sequence[float]]:
        """The scores of every unit of each history, by weights of a version and prompts of at most ``tokens``."""
        keys = [ScoreKey(history, tokens, version) for history in histories]
        return await asyncio.gather(*(self._results.get(key, partial(compute, key.history)) for key in keys))
