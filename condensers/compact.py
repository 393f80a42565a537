"""The condenser for which the policy says when it wants to write a summary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from condensegrpo.condensers.decisions import decision_tool, decisions
from condensegrpo.condensers.summary import SummaryRequests
from condensegrpo.core.messages import History
from condensegrpo.core.protocols.condenser import Budget, Condensed
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.wording import counted

COMPACT = "compact"


@dataclass(frozen=True, slots=True)
class Compact(SummaryRequests):
    """Requests a summary, as ``summary`` does, after the policy called ``compact()``, and keeps it until the next one.

    A call needs ``min_turns`` turns since the last summary: otherwise a policy could do nothing but write summaries. It
    needs ``keep_last`` of them, too: with the turn of the call, one more than stay verbatim.
    The budget plays no part unless ``over_budget`` is set.
    """

    min_turns: Annotated[int, Ge(1)] = 2  # since the last summary, before the turn of the call
    over_budget: bool = False  # request a summary too where the history is over budget, though the policy did not call

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The newest units behind a new summary if the policy called for one; else the units behind the last."""
        if any(decisions(history.raw_units[-1:], COMPACT)):
            condensed = await self.summarise(history, budget, tools, always=True)
            return replace(condensed, reason=f"{condensed.reason or 'nothing to summarise'}, by the policy's call")
        if self.over_budget:
            return await self.summarise(history, budget, tools, always=False)
        return Condensed(units=history.current_units)

    def tools(self) -> Sequence[EnvironmentTool]:
        """``compact``."""
        description = "Asks you for a summary of the conversation, which then replaces it in your context."
        return (decision_tool(COMPACT, description, {}, self._accepted),)

    def _accepted(self, arguments: Mapping[str, object], history: History) -> str:
        through = -1 if history.summary is None else history.summary.through
        turns = sum(unit.turn > through for unit in history.raw_units)
        least = max(self.min_turns, self.keep_last)
        if turns < least:
            there = f"there {'is' if turns == 1 else 'are'}"
            since = there if history.summary is None else f"since the last summary {there}"
            raise ValueError(f"{since} {counted(turns, 'turn', 'turns')} to summarise, and at least {least} are needed")
        return "You are asked for a summary next."
