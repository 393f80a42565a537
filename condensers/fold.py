"""The condenser that folds branches: what lies between the policy's ``branch`` and its ``return`` leaves the view.

turn   0        1            2            3            4             5
       search   branch("b")  search       search       return("12")  search
view before turn 4:  0 1 2 3       view before turn 5:  0 1 4       spans: kept 0-1, dropped 2-3, kept 4
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from condensegrpo.condensers.decisions import decision_tool, decisions, named_turns, reason_of, text_argument
from condensegrpo.core.condenser import Budget, Condensed, Condenser
from condensegrpo.core.messages import History, Unit
from condensegrpo.core.protocols.tool import EnvironmentTool

BRANCH, RETURN = "branch", "return"


class FoldedBranch(NamedTuple):
    """A branch of the policy."""

    opened: int  # the turn that opened it, which belongs to the main line
    closed: int | None = None  # the turn that returned from it, which belongs to the branch; None: it is open
    folded: tuple[int, ...] = ()  # the turns of the units that left the view then


@dataclass(frozen=True)
class Fold(Condenser):
    """Drops what lies between the policy's calls ``branch(description)`` and ``return(message)``; these two stay.

    Branches are not nested, and a return needs a turn to fold. The budget plays no part: a history over budget is
    returned as it is, unless a later stage of a pipeline cuts it.
    """

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The units outside of folded branches."""
        closed = [branch for branch in folded_branches(history.raw_units) if branch.closed is not None]
        folded = {turn for branch in closed for turn in branch.folded}
        units = tuple(unit for unit in history.current_units if unit.is_note or unit.turn not in folded)
        made = [(branch.folded, f"return in turn {branch.closed}") for branch in closed]
        return Condensed(units=units, reason=reason_of("folded", made))

    def tools(self) -> Sequence[EnvironmentTool]:
        """``branch`` and ``return``."""
        description = {"type": "string", "description": "The task of the branch."}
        message = {"type": "string", "description": "What the branch found, all that is needed of it later."}
        return (
            decision_tool(
                BRANCH,
                f"Opens a branch for a part of the task. Its turns are shown until you call {RETURN}.",
                {"description": description},
                _opened,
            ),
            decision_tool(
                RETURN,
                "Ends the branch: the turns since it was opened leave your context, and the message stays.",
                {"message": message},
                _returned,
            ),
        )


def folded_branches(units: Sequence[Unit]) -> tuple[FoldedBranch, ...]:
    """The branches of an episode, in order; the last may be open."""
    made: list[FoldedBranch] = []
    for decision in decisions(units, BRANCH, RETURN):
        is_open = bool(made) and made[-1].closed is None
        if decision.name == BRANCH and not is_open:
            made.append(FoldedBranch(decision.turn))
        elif decision.name == RETURN and is_open:
            opened = made[-1].opened
            inside = tuple(unit.turn for unit in units if opened < unit.turn < decision.turn)
            made[-1] = FoldedBranch(opened, decision.turn, inside)
    return tuple(made)


def _last_branch(history: History) -> FoldedBranch | None:
    branches = folded_branches(history.raw_units)
    return branches[-1] if branches else None


def _opened(arguments: Mapping[str, object], history: History) -> str:
    text_argument(arguments, "description")
    last = _last_branch(history)
    if last is not None and last.closed is None:
        raise ValueError(
            f"the branch of turn {last.opened} is open, and branches are not nested; {RETURN} from it first"
        )
    return "The branch is open."


def _returned(arguments: Mapping[str, object], history: History) -> str:
    text_argument(arguments, "message")
    last = _last_branch(history)
    if last is None:
        raise ValueError(f"no branch is open; open one with {BRANCH}")
    if last.closed is not None:
        folded = f"{named_turns(last.folded)} {'was' if len(last.folded) == 1 else 'were'}"
        raise ValueError(f"no branch is open: {folded} folded in turn {last.closed} already")
    inside = [unit.turn for unit in history.raw_units if unit.turn > last.opened]
    if not inside:
        raise ValueError(
            f"there is nothing to fold: no turn lies between this one and the branch of turn {last.opened}"
        )
    return f"{named_turns(inside).capitalize()} left your context."
