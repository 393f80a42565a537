"""The condenser that masks old observations and keeps every reply: the baseline to beat."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from annotated_types import Ge

from condensegrpo.condensers.fit import most_rewritten, reported
from condensegrpo.core.condenser import Budget, Condensed, Condenser
from condensegrpo.core.messages import History, Message, Unit

VERBATIM, VERBATIM_LENGTH = " verbatim: ", 400  # what ``anchors`` puts behind a placeholder, and most characters of it
CACHED_UNITS = 16384  # masked units
PLACEHOLDER = re.compile(
    r"\[turn [0-9]+, [a-z ]+ omitted: [0-9]+ tokens\]" + rf"(?:{VERBATIM}[^\n]{{1,{VERBATIM_LENGTH}}})?"
)


def masked(unit: Unit, message: Message) -> Message:
    """A message that answered a reply, with a placeholder for its text: its role, name and call stay.

        tool: 0.7312, 0.1184, …   ─▶   tool: [turn 3, tool result omitted: 812 tokens]

    A message that is no longer than its placeholder is returned unchanged, and so is that of a note.
    """
    kind = "observation" if message.tool_call_id is None else "tool result"
    mask = f"[turn {unit.turn}, {kind} omitted: {unit.tokens_of(message)} tokens]"
    if len(message.text) <= len(mask) or unit.is_note or (PLACEHOLDER.fullmatch(message.text)):
        return message
    return replace(message, content=mask)


@dataclass(frozen=True)
class ObservationMask(Condenser):
    """Replaces old tool results and observations by placeholders; actions and thoughts stay.

    Results of the newest ``keep`` units stay verbatim. If that is over budget, results of kept units are masked
    too, the oldest first and never the newest unit's; if that is not enough either, the oldest units are dropped.
    """

    keep: Annotated[int, Ge(0)] = 3
    exclude_tools: Sequence[str] = ()  # results of these tools are never masked
    only_tools: bool = False  # keep observations of the environment, such as further user messages
    drop_oldest: bool = True  # False: only mask, for a pipeline whose later stage fits the budget
    _masked: dict[int, tuple[Unit, Unit]] = field(default_factory=dict, init=False, compare=False, repr=False)

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The units with their old results masked."""
        units = history.units
        last = len(units) - 1 if self.keep else len(units)  # the newest unit is never masked unless keep=0
        spare = range(last - 1, max(len(units) - self.keep, 0) - 1, -1)

        def mask(index: int) -> Unit:
            return self.masked(units[index]) if index < last else units[index]

        kept = most_rewritten(units, mask, spare, budget.tokens, drop_oldest=self.drop_oldest)
        return reported(units, kept, "masked the results")

    def masked(self, unit: Unit) -> Unit:
        """A unit with placeholders for its results, made once."""
        known = self._masked.get(id(unit))
        if known is None or known[0] is not unit:  # equal units may have other ids
            if len(self._masked) >= CACHED_UNITS:
                self._masked.clear()
            known = self._masked[id(unit)] = unit, self._made(unit)
        return known[1]

    def _made(self, unit: Unit) -> Unit:
        results = tuple(
            result
            if result.name in self.exclude_tools or (self.only_tools and result.tool_call_id is None)
            else masked(unit, result)
            for result in unit.results
        )
        return unit if results == unit.results else unit.with_results(results, media_tokens=0)
