"""Condensers for which the policy writes a summary, in a condense turn that is trained like any other.

``summary`` requests it by the length of the history, ``compact`` when the policy calls for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Template
from typing import Annotated

from annotated_types import Ge

from condensegrpo.condensers.decisions import decision_tool, decisions
from condensegrpo.condensers.fit import fits
from condensegrpo.condensers.observation_mask import ObservationMask
from condensegrpo.condensers.summarising import (
    SummaryPlan,
    read_instruction,
    summarised,
    summary_plan,
    usable,
    without_summary,
)
from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.messages import History, Message, Summary, Unit
from condensegrpo.core.protocols.condenser import Budget, Condensed, Request
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.wording import plural


@dataclass(frozen=True, slots=True)
class SummaryRequests:
    """How the policy writes a summary, whichever condenser decides when.

    The request follows the prompt that would have come next, so that system message and tools are those of a normal
    turn. If it does not fit, old tool results are masked in it, and after that the kept units are left out of it. An
    unusable text is rejected, trains nothing, and is requested once more; then old results are masked instead. The last
    summary stays until a new one replaces it, which is written with the last one in view.
    """

    keep_last: Annotated[int, Ge(1)] = 1  # units that stay verbatim; fewer if they leave a summary no room
    max_tokens: Annotated[int, Ge(1)] = 256  # of a summary; never more than a reply may have
    attempts: Annotated[int, Ge(1)] = 2  # texts that the policy may write before old results are masked instead
    template: str | None = None  # a text file with $tokens and $kept; null: summary.txt of the package
    instruction: Template = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "instruction", read_instruction(self.template))  # frozen, and read only once

    @property
    def writes(self) -> int:
        """Texts that one call may request."""
        return self.attempts

    def check_room(self, pinned: Sequence[Message], budget: Budget) -> None:
        """Refuse a budget in which a summary can never be requested, or never have its full length."""
        reply, longest = Message(role="assistant", content=""), self._longest(budget)
        text = self.instruction.substitute(tokens=longest, kept=self.keep_last)
        request = (*pinned, *Unit(turn=0, reply=reply).with_instruction(text).messages)
        shown = (*pinned, *Summary(text="", through=0, tokens=0).unit.messages)
        need, needed = budget.count(shown) + longest, budget.count(request)
        most = budget.request_tokens or budget.tokens
        if need > budget.tokens or needed > most:
            raise ValueError(
                f"behind system message and question a summary of {longest} tokens (max_tokens, or what a reply may "
                f"have) makes {need} tokens, of {budget.tokens} that a condensed prompt may have, and asking for it "
                f"{needed}, of {most}. Raise rollout.limits.max_context_tokens, lower max_tokens, shorten the template"
            )

    async def summarise(
        self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]], *, always: bool
    ) -> Condensed:
        """The newest units behind a summary; the units unchanged if they are within the budget, unless ``always``."""
        room = self._longest(budget)
        plan = summary_plan(history, budget, keep_last=self.keep_last, room=room, always=always)
        if plan is None or budget.write is None:
            return await without_summary(history, budget, tools, why="")
        request = self._request(plan, history, budget)
        if request is None:
            return await without_summary(history, budget, tools, why="a request for a summary does not fit")
        rejected: list[str] = []
        for _ in range(self.attempts):
            written = await budget.write(request)
            try:
                summary = usable(written, plan, history, budget)
            except SummaryRefused as refusal:
                rejected.append(str(refusal))
                continue
            return summarised(summary, plan, history, budget, rejected)
        why = f"no summary can be used: {'; '.join(rejected)}"
        return await without_summary(history, budget, tools, why=why, rejected=rejected)

    def _request(self, plan: SummaryPlan, history: History, budget: Budget) -> Request | None:
        """The request with all units, with old results masked, or without the kept units; None if none fits."""
        text = self.instruction.substitute(tokens=self._longest(budget), kept=len(plan.kept))
        room = replace(budget, tokens=budget.request_tokens or budget.tokens)
        for units, keep in ((plan.view, None), (plan.view, 1), (plan.covered, 0)):
            shown = units
            if keep is not None:
                shown = ObservationMask(keep=keep).masked(history.with_units(units), budget.count)
            *before, latest = shown
            if fits(history, (*before, latest.with_instruction(text)), room):
                return Request(units=shown, instruction=text, max_tokens=self.max_tokens)
        return None

    def _longest(self, budget: Budget) -> int:
        """The longest usable summary in tokens: a longer text would be cut off and rejected."""
        return self.max_tokens if budget.reply_tokens is None else min(self.max_tokens, budget.reply_tokens)


@dataclass(frozen=True, slots=True)
class PolicySummary(SummaryRequests):
    """Keeps the newest units and replaces all earlier units by a summary that the policy writes."""

    always: bool = False  # summarise within the budget too, whenever a unit is new

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The newest units behind a summary; the units unchanged if they are within the budget."""
        return await self.summarise(history, budget, tools, always=self.always)


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
            raise ValueError(f"{since} {plural(turns, 'turn', 'turns')} to summarise, and at least {least} are needed")
        return "You are asked for a summary next."
