"""The public fake of a scorer: scores by a function of the unit, the same every time. Needs no model."""

from collections.abc import Callable, Sequence

from condensegrpo.core.messages import History, Unit


class ScriptedScorer:
    """``ScriptedScorer(lambda unit: float("gold" in unit.reply.text))`` scores 1 for units that mention gold."""

    def __init__(self, score: Callable[[Unit], float]) -> None:
        """Set the script.

        Args:
            score: of a unit, not negative.
        """
        self._score = score
        self.sizes: list[int] = []  # number of units of each history scored

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        """The scripted scores."""
        self.sizes += [len(history.units) for history in histories]
        return [[self._score(unit) for unit in history.units] for history in histories]
