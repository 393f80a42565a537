"""The condenser that lets the policy see an omitted observation again; it drops nothing itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from condensegrpo.condensers.decisions import decision_tool
from condensegrpo.core.messages import History, Unit
from condensegrpo.core.protocols.condenser import Budget, Condensed
from condensegrpo.core.protocols.tool import EnvironmentTool, ToolResult
from condensegrpo.core.results import RECALLED, bare
from condensegrpo.core.wording import ranges


@dataclass(frozen=True, slots=True)
class Recall:
    """Answers the policy's ``recall(turn)`` with what answered the reply of that turn, if a condenser left it out.

    The answer is a result like any other: it ages, and condensers mask or drop it. Every answer counts as a refetch.
    """

    max_chars: Annotated[int, Ge(1)] = 1000  # of an answer; of a longer observation its beginning

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """All units, unchanged."""
        return Condensed(units=history.current_units)

    def tools(self) -> Sequence[EnvironmentTool]:
        """``recall``."""
        turn = {"type": "integer", "description": "The number of the turn."}
        description = "Shows once more what answered you in a turn that left your context."
        return (decision_tool("recall", description, {"turn": turn}, self._accepted),)

    def _accepted(self, arguments: Mapping[str, object], history: History) -> ToolResult:
        turn = arguments.get("turn")
        units = {unit.turn: unit for unit in history.raw_units}
        if type(turn) is not int or turn not in units:
            raise ValueError(f"there is no turn {turn!r:.40}; the turns so far: {ranges(units) or 'none'}")
        view = history.raw_units if history.shown is None else (*history.shown, history.raw_units[-1])
        if any(unit.turn == turn and _shows(unit, units[turn]) for unit in view):
            raise ValueError(f"turn {turn} is in your context; read it there")
        text = "\n".join(map(bare, units[turn].results))
        rest = len(text) - self.max_chars
        cut = f"\n[… {rest} characters left out …]" if rest > 0 else ""
        pictures = tuple(part for message in units[turn].results for part in message.media)
        return ToolResult(text=f"{RECALLED}{turn}]\n{text[: self.max_chars]}{cut}", media=pictures)


def _shows(shown: Unit, raw: Unit) -> bool:
    """Whether a shown unit has the results of the raw one, with or without notes after them."""
    pairs = zip(shown.results, raw.results, strict=False)
    return not shown.is_summary and all(now.text.startswith(before.text) for now, before in pairs)
