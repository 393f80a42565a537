"""The condenser that masks old observations and keeps every reply: the baseline to beat."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from condensegrpo.condensers.fit import fewest_rewritten, reported
from condensegrpo.core.messages import History, Message, Rewrites, Unit
from condensegrpo.core.protocols.condenser import Budget, Condensed, Count

VERBATIM, VERBATIM_LENGTH = " verbatim: ", 400  # what ``anchors`` puts behind a placeholder, and most characters of it
PLACEHOLDER = re.compile(
    r"\[turn [0-9]+, [a-z ]+ omitted: [0-9]+ tokens\]" + rf"(?:{VERBATIM}[^\n]{{1,{VERBATIM_LENGTH}}})?"
)


def masked(history: History, unit: Unit, message: Message, count: Count) -> Message:
    """A message that answered a reply, with a placeholder for its text: its role, name and call stay.

        tool: 0.7312, 0.1184, …   ─▶   tool: [turn 3, tool result omitted: 812 tokens]

    The tokens are those that the message adds to pinned messages and reply, its share of the template included. A
    message that is no longer than its placeholder is returned unchanged, and so is that of a summary.
    """
    if unit.is_summary or PLACEHOLDER.fullmatch(message.text):
        return message
    before = (*history.pinned, unit.reply)
    reply = count(before)
    tokens = count((*before, message)) - reply
    kind = "observation" if message.tool_call_id is None else "tool result"
    mask = replace(message, content=f"[turn {unit.turn}, {kind} omitted: {tokens} tokens]")
    return mask if count((*before, mask)) - reply < tokens else message


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
        """The units with their old results masked. Costs three counts for a new result and log2 of the kept units."""
        units = history.units
        required = max(len(units) - self.keep, 0)
        most = max(len(units) - 1, required)
        masks = self._masks(history, budget.count, most)

        def shown(oldest: int) -> tuple[Unit, ...]:
            return (*masks[:oldest], *units[oldest:])

        kept = fewest_rewritten(history, shown, range(required, most + 1), budget, drop_oldest=self.drop_oldest)
        return reported(units, kept, "masked the results")

    def masked(self, history: History, count: Count) -> tuple[Unit, ...]:
        """All units, with placeholders for the results of all but the newest ``keep``, whatever the budget."""
        masked = max(len(history.units) - self.keep, 0)
        return (*self._masks(history, count, masked), *history.units[masked:])

    def _masks(self, history: History, count: Count, most: int) -> tuple[Unit, ...]:
        """The oldest units with placeholders for their results; each is made once in an episode."""
        made = history.rewrites.setdefault((ObservationMask, tuple(self.exclude_tools), self.only_tools), Rewrites())
        return made.of(history.units[:most], lambda unit: self._masked(history, unit, count))

    def _masked(self, history: History, unit: Unit, count: Count) -> Unit:
        def keeps(result: Message) -> bool:
            return result.name in self.exclude_tools or (self.only_tools and result.tool_call_id is None)

        results = tuple(result if keeps(result) else masked(history, unit, result, count) for result in unit.results)
        return unit if results == unit.results else replace(unit, results=results)
