"""The cache of scorers: scores by the content of a history, the longest prompt and the version of the weights."""

from typing import NamedTuple

from condensegrpo.core.messages import History
from condensegrpo.core.shared_results import SharedResults

CACHED = 4096  # histories whose scores are kept


class ScoreKey(NamedTuple):
    """What scores depend on. Equal by content; the hash reads the newest unit only, however long the history is."""

    history: History
    tokens: int  # of the longest prompt
    version: int  # optimiser step of the weights

    def __hash__(self) -> int:
        """Differs where the newest replies differ, which is where trajectories differ."""
        newest = self.history.units[-1].reply.text if self.history.units else ""
        return hash((len(self.history.units), newest, self.tokens, self.version))


def score_cache() -> SharedResults[ScoreKey, tuple[float, ...]]:
    """An empty cache."""
    return SharedResults(CACHED)
