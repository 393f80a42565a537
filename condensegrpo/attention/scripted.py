"""The public fake of a scorer: scores by a function of the unit, the same every time. Needs no model."""

from collections.abc import Callable, Sequence

from condensegrpo.core.messages import History, Unit


class ScriptedScorer:
    """``ScriptedScorer(lambda unit: float("gold" in unit.reply.content))`` wants the units that speak of gold."""

    def __init__(self, worth: Callable[[Unit], float]) -> None:
        """Set the script.

        Args:
            worth: the score of a unit, not negative.
        """
        self._worth = worth
        self.asked: list[int] = []  # units of each history that was scored

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        """The scores by the script."""
        self.asked += [len(history.units) for history in histories]
        return [[self._worth(unit) for unit in history.units] for history in histories]
