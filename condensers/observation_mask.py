"""The condenser that masks old observations and keeps every reply: the baseline to beat."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from condensegrpo.condensers.fit import fits, newest_that_fit
from condensegrpo.condensers.placeholder import masked
from condensegrpo.core.account import account
from condensegrpo.core.messages import History, Message, Unit
from condensegrpo.core.protocols import Budget, Condensed, Count
from condensegrpo.core.trajectory import Span, SpanStatus


@dataclass(frozen=True, slots=True)
class ObservationMask:
    """Replaces old tool results and observations by placeholders; actions and thoughts stay.

    Results of the newest ``keep`` units stay verbatim. If that is over budget, results of kept units are masked
    too, the oldest first and never the newest unit's; if that is not enough either, the oldest units are dropped.
    """

    keep: Annotated[int, Ge(0)] = 3
    exclude_tools: Sequence[str] = ()  # results of these tools are never masked
    only_tools: bool = False  # keep observations of the environment, such as further user messages
    drop_oldest: bool = True  # False: only mask, for a pipeline whose later stage fits the budget

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The units with their old results masked. Costs three counts for every result and log2 of the units more."""
        total = len(history.units)
        wanted = max(total - self.keep, 0)
        most = max(total - 1, wanted)
        masks = [self._masked(history, unit, budget.count) for unit in history.units[:most]]

        def shown(oldest: int) -> tuple[Unit, ...]:
            return (*masks[:oldest], *history.units[oldest:])

        needed = bisect_left(range(wanted, most), True, key=lambda oldest: fits(history.pinned, shown(oldest), budget))
        units = shown(wanted + needed)
        if self.drop_oldest:
            units = newest_that_fit(history.pinned, units, budget)
        spans = account(history, units, budget.count)
        return Condensed(units=units, spans=spans, reason=_reason(spans))

    def _masked(self, history: History, unit: Unit, count: Count) -> Unit:
        def keeps(result: Message) -> bool:
            return result.name in self.exclude_tools or (self.only_tools and result.tool_call_id is None)

        results = (result if keeps(result) else masked(history, unit, result, count) for result in unit.results)
        return replace(unit, results=tuple(results))


def _reason(spans: Sequence[Span]) -> str:
    masked_units = sum(span.status is SpanStatus.REWRITTEN for span in spans)
    dropped = sum(span.status is SpanStatus.DROPPED for span in spans)
    parts = [f"masked the results of {masked_units} of {len(spans)} units"] if masked_units else []
    parts += [f"dropped the {dropped} oldest"] if dropped else []
    return ", ".join(parts)
