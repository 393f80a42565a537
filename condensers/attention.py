"""The condenser that keeps what the model attends to: units ranked by score per token, under the budget.

    units        0    1    2    3    4        4 is the newest
    tokens      30   90   20   60   25
    score       .9   .6   .1   .9   –         of a scorer; real attention, see attention/
    per token   .03  .007 .005 .015 –         rank 0 3 1 2
    room 140    keep 4 (25), 0 (30), 3 (60); 1 does not fit (90); 2 (20)      shown 0 2 3 4

Scores are smoothed over the last turns, and a unit that was dropped returns only if it is clearly better. Both are
recomputed from the history at every call: a condenser keeps no state, and one serves all episodes at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt

from condensegrpo.condensers.fit import total
from condensegrpo.core.condenser import Budget, Condensed, Condenser, UnitScorer
from condensegrpo.core.messages import History


@dataclass(frozen=True, kw_only=True)
class AttentionCondenser(Condenser):
    """Keeps the newest unit and the others with the highest scores per token. Order is kept; units stay whole.

    A history within the budget is returned unchanged and not scored. Dropped units leave no placeholder.
    """

    # whose attention: policy, leave_one_out, or a frozen model's folder or Hub id; policy@0,1: layers
    scorer: str = "policy"
    smoothing: Annotated[float, Ge(0), Lt(1)] = 0.5  # weight of earlier turns in a score; 0: each turn by itself
    lookback: Annotated[int, Ge(0)] = 2  # earlier turns that are scored again; each costs one pass unless cached
    hysteresis: Annotated[float, Ge(1)] = 1.25  # factor by which a dropped unit must be better to return

    @property
    def scorers(self) -> tuple[str, ...]:
        """The name of the scorer that it looks up in ``Budget.scorers``."""
        return (self.scorer,)

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The units to show. Costs one pass per turn."""
        if len(history.units) < 2 or total(history.units) <= budget.tokens:
            return Condensed(units=history.units)
        ranked = await self._ranked(history, budget)
        shown = tuple(history.units[index] for index in sorted(ranked))
        return Condensed(
            units=shown,
            reason=f"kept {len(shown)} of {len(history.units)} units by the attention of {self.scorer}",
        )

    async def _ranked(self, history: History, budget: Budget) -> list[int]:
        """The kept units, the newest first and then the best, with the scores of earlier turns smoothed in."""
        room, number, costs = budget.tokens, len(history.units), [max(unit.tokens, 1) for unit in history.units]
        ends = [end for end in range(max(number - self.lookback, 2), number + 1) if sum(costs[:end]) > room] or [number]
        pasts = [History(pinned=history.pinned, units=history.units[:end]) for end in ends]
        ranked: list[int] = []
        smooth: list[float] = []
        for end, scores in zip(ends, await _scores(budget, self.scorer, pasts), strict=True):
            smooth = [
                self.smoothing * smooth[index] + (1 - self.smoothing) * score if index < len(smooth) else score
                for index, score in enumerate(scores[:-1])
            ]
            known = set(ranked) if ranked else set(range(end))
            returning = set(range(end - 2)) - known
            worth = [
                score / costs[index] / (self.hysteresis if index in returning else 1.0)
                for index, score in enumerate(smooth)
            ]
            ranked = choose_units(worth, costs[:end], room)
        return ranked


def choose_units(worth: Sequence[float], costs: Sequence[int], room: int) -> list[int]:
    """The newest unit, then the units of the greatest worth that still fit; at equal worth the newer unit.

        Worth 3 1 2 and the newest, costs 4 1 4 2, room 8 ─▶ 3 (2), 0 (4), 2 does not fit, 1 (1)

    Args:
        worth: of every unit but the newest.
        costs: of every unit, in tokens.
        room: for all of them, in tokens; the newest is chosen even if it does not fit.
    """
    newest = len(costs) - 1
    chosen, left = [newest], room - costs[newest]
    for index in sorted(range(newest), key=lambda index: (-worth[index], -index)):
        if costs[index] <= left:
            chosen.append(index)
            left -= costs[index]
    return chosen


async def _scores(budget: Budget, name: str, pasts: Sequence[History]) -> Sequence[Sequence[float]]:
    """One row of scores per history; a ValueError if the scorer is unknown or a score is not a finite number >= 0."""
    scorer: UnitScorer | None = budget.scorers.get(name)
    if scorer is None:
        raise ValueError(
            f"ranking {len(pasts[-1].units)} units: wanted the scorer {name!r}, and the budget has "
            f"{', '.join(budget.scorers) or 'none'}"
        )
    rows = await scorer.score(pasts, budget.prompt_tokens)
    for past, scores in zip(pasts, rows, strict=True):
        if len(scores) != len(past.units) or not all(0 <= score < float("inf") for score in scores):
            raise ValueError(
                f"the scorer {name!r} returned {list(scores)!r:.80} for {len(past.units)} units, wanted one finite, "
                f"non-negative number per unit"
            )
    return rows
