"""The condenser that keeps the newest units, and if asked the first ones."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from condensegrpo.condensers.spans import spans
from condensegrpo.messages import History, flatten
from condensegrpo.protocols import Budget, Condensed


@dataclass(frozen=True, slots=True)
class LastK:
    """Keeps the first ``keep_first`` and last ``keep_last`` units, then drops the oldest of those until the rest fits.

    The newest kept unit is never dropped: if it does not fit alone it is returned alone, and the engine stops. What is
    kept is verbatim, and nothing stands in for what is dropped: a placeholder would be a reply that nobody gave.
    """

    keep_last: int = 1  # 0 keeps none
    keep_first: int = 0

    def __post_init__(self) -> None:
        if index(self.keep_last) < 0 or index(self.keep_first) < 0:
            raise ValueError(
                f"keep_last and keep_first count units and must be at least 0, "
                f"found {self.keep_last} and {self.keep_first}"
            )

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, Any]]) -> Condensed:
        """The kept units. Costs one count for every unit and log2 of the kept units more."""
        total = len(history.units)
        first, last = range(min(self.keep_first, total)), range(max(total - self.keep_last, 0), total)
        wanted = sorted({*first, *last})

        def fits(dropped: int) -> bool:
            units = [history.units[position] for position in wanted[dropped:]]
            return budget.count(flatten(history.head, units)) <= budget.tokens

        dropped = bisect_left(range(max(len(wanted) - 1, 0)), True, key=fits)
        kept = wanted[dropped:]
        return Condensed(
            units=tuple(history.units[position] for position in kept),
            spans=spans(history, kept, budget.count),
            reason=_reason(total, len(wanted), dropped, budget.tokens),
        )


def _reason(total: int, wanted: int, dropped: int, tokens: int) -> str:
    if wanted - dropped == total:
        return ""
    fitted = f", without the {dropped} oldest of them to fit {tokens} tokens" if dropped else ""
    return f"kept {wanted} of {total} units{fitted}"
