"""Condensers for which the policy writes a summary, in a condense turn that is trained like any other.

``summary`` requests it by the length of the history, ``compact`` when the policy calls for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Template
from typing import Annotated

from annotated_types import Ge

from condensegrpo.condensers.decisions import decision_tool, decisions
from condensegrpo.condensers.observation_mask import ObservationMask
from condensegrpo.condensers.summarising import (
    empty_summary_tokens,
    read_instruction,
    summarised,
    summary_plan,
    usable,
    without_summary,
)
from condensegrpo.core.condenser import Budget, Condensed, Condenser, Count, Request
from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.messages import History, Message, Unit
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.wording import plural


@dataclass(frozen=True)
class SummarisingCondenser(Condenser):
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

    def check(self, pinned: Sequence[Message], budget: Budget, count: Count) -> None:
        """Refuse a budget in which a summary can never be requested, or never have its full length."""
        longest = self._longest(budget)
        text = self.instruction.substitute(tokens=longest, kept=self.keep_last)
        empty = Unit(turn=0, reply=Message(role="assistant", content=""))
        request = count((*pinned, *empty.with_instruction(text).messages))
        need = empty_summary_tokens(pinned, count) + longest
        if need > budget.tokens or request > budget.prompt_tokens:
            raise ValueError(
                f"behind system message and question a summary of {longest} tokens (max_tokens, or what a reply may "
                f"have) takes {need} tokens, of {budget.tokens} that units may have, and a prompt that asks for it "
                f"{request}, of {budget.prompt_tokens}. Raise rollout.limits.max_context_tokens, lower max_tokens, "
                f"shorten the template"
            )

    async def summarise(self, history: History, budget: Budget, *, always: bool) -> Condensed:
        """The newest units behind a summary; the units unchanged if they are within the budget, unless ``always``."""
        room = self._longest(budget)
        plan = summary_plan(history, budget, keep_last=self.keep_last, room=room, always=always)
        if plan is None or budget.write is None:
            return await without_summary(history, budget, why="")
        text = self.instruction.substitute(tokens=room, kept=len(plan.kept))
        mask = ObservationMask().masked
        views = [plan.view, (*map(mask, plan.view[:-1]), plan.view[-1]), tuple(map(mask, plan.covered))]
        rejected: list[str] = []
        while len(rejected) < self.attempts and views:
            request = Request(units=views[0], instruction=text, max_tokens=self.max_tokens)
            try:
                written = await budget.write(request)
            except SummaryRefused:  # the request does not fit
                del views[0]
                continue
            try:
                return summarised(usable(written, plan, history, budget), plan, rejected)
            except SummaryRefused as refusal:
                rejected.append(str(refusal))
        unusable = f"no summary can be used: {'; '.join(rejected)}"
        why = unusable if rejected else "a request for a summary does not fit"
        return await without_summary(history, budget, why=why, rejected=rejected)

    def _longest(self, budget: Budget) -> int:
        """The longest usable summary in tokens: a longer text would be cut off and rejected."""
        return self.max_tokens if budget.reply_tokens is None else min(self.max_tokens, budget.reply_tokens)


@dataclass(frozen=True)
class PolicySummary(SummarisingCondenser):
    """Keeps the newest units and replaces all earlier units by a summary that the policy writes."""

    always: bool = False  # summarise within the budget too, whenever a unit is new

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The newest units behind a summary; the units unchanged if they are within the budget."""
        return await self.summarise(history, budget, always=self.always)


COMPACT = "compact"


@dataclass(frozen=True)
class Compact(SummarisingCondenser):
    """Requests a summary, as ``summary`` does, after the policy called ``compact()``, and keeps it until the next one.

    A call needs ``min_turns`` turns since the last summary: otherwise a policy could do nothing but write summaries. It
    needs ``keep_last`` of them, too: with the turn of the call, one more than stay verbatim.
    The budget plays no part unless ``over_budget`` is set.
    """

    min_turns: Annotated[int, Ge(1)] = 2  # since the last summary, before the turn of the call
    over_budget: bool = False  # request a summary too where the history is over budget, though the policy did not call

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The newest units behind a new summary if the policy called for one; else the units behind the last."""
        if any(decisions(history.raw_units[-1:], COMPACT)):
            condensed = await self.summarise(history, budget, always=True)
            return replace(condensed, reason=f"{condensed.reason or 'nothing to summarise'}, by the policy's call")
        if self.over_budget:
            return await self.summarise(history, budget, always=False)
        return Condensed(units=history.current_units)

    def tools(self) -> Sequence[EnvironmentTool]:
        """``compact``."""
        description = "Asks you for a summary of the conversation, which then replaces it in your context."
        return (decision_tool(COMPACT, description, {}, self._accepted),)

    def _accepted(self, arguments: Mapping[str, object], history: History) -> str:
        through = -1 if history.note is None else history.note.turn
        turns = sum(unit.turn > through for unit in history.raw_units)
        least = max(self.min_turns, self.keep_last)
        if turns < least:
            there = f"there {'is' if turns == 1 else 'are'}"
            since = there if history.note is None else f"since the last summary {there}"
            raise ValueError(f"{since} {plural(turns, 'turn')} to summarise, and at least {least} are needed")
        return "You are asked for a summary next."
