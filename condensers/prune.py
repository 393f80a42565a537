"""The condenser that drops the turns that the policy names, or shows a note in their place.

turn   0        1        2        3                                4
       search   search   search   prune([0, 1], "Mia 0.73")        search
view before turn 4:  [Mia 0.73 · turns up to 1 omitted …]  2  3      spans: dropped 0, rewritten 1, kept 2-3
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from annotated_types import Ge

from condensegrpo.condensers.decisions import decision_tool, decisions, named_turns, reason_of, text_argument
from condensegrpo.core.condenser import Budget, Condensed, Condenser
from condensegrpo.core.messages import History, Unit, note
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.wording import plural, ranges

PRUNE = "prune"


class Pruned(NamedTuple):
    """The turns that a call of the policy removed, as long as no later call removes its note."""

    turn: int  # of the call
    turns: tuple[int, ...]  # sorted, those of earlier notes in its place included
    note: str  # shown where the last of them stood; empty: nothing is


@dataclass(frozen=True)
class Prune(Condenser):
    """Drops the turns that the policy names in ``prune(turns, note)``; a note is shown where the last of them stood.

    A note may be pruned as the turn where it stands. The call itself stays until it is named by a later one. The budget
    plays no part: a history over budget is returned as it is, unless a later stage of a pipeline cuts it.
    """

    note_chars: Annotated[int, Ge(1)] = 400  # longest note, in characters; always shorter than what it replaces

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The units that are left, and the notes."""
        calls = prunings(history.raw_units)
        gone, noted = _removed(calls)

        def shown() -> Iterator[Unit]:
            for unit in history.current_units:
                if unit.is_note or unit.turn not in gone:
                    yield unit
                elif unit.turn in noted:
                    call = noted[unit.turn]
                    dropped = [unit for unit in history.raw_units if unit.turn in call.turns]
                    yield note(history, dropped, call.note, how="replaced by your note above")

        made = [(call.turns, f"call in turn {call.turn}") for call in calls]
        return Condensed(units=tuple(shown()), reason=reason_of("pruned", made))

    def tools(self) -> Sequence[EnvironmentTool]:
        """``prune``."""
        turns = {"type": "array", "items": {"type": "integer"}, "description": "Numbers of turns."}
        note = {"type": "string", "description": "What is shown in their place; leave it out to show nothing."}
        description = "Removes turns from your context that are no longer needed. They do not come back."
        parameters: Mapping[str, Mapping[str, object]] = {"turns": turns, "note": note}
        return (decision_tool(PRUNE, description, parameters, self._accepted, optional=["note"]),)

    def _accepted(self, arguments: Mapping[str, object], history: History) -> str:
        units = {unit.turn: unit for unit in history.raw_units}
        turns = _turns(arguments)
        unknown = turns - units.keys()
        if unknown:
            are = "is" if len(unknown) == 1 else "are"
            raise ValueError(f"there {are} no {named_turns(unknown)}; the turns so far: {ranges(units) or 'none'}")
        view, (gone, noted) = history.visible_units, _removed(prunings(history.raw_units))
        visible = {unit.turn for unit in view if not unit.is_note and unit.turn not in gone}
        visible |= noted.keys() & {unit.turn for unit in view}
        omitted = turns - visible
        if omitted:
            are = "is" if len(omitted) == 1 else "are"
            raise ValueError(
                f"{named_turns(omitted)} {are} not in your context any more; in it are {ranges(visible) or 'none'}"
            )
        if arguments.get("note") is not None:
            raw = {turn: "".join(message.text for message in units[turn].messages) for turn in turns}
            replaced = sum(len(noted[turn].note if turn in noted else text) for turn, text in raw.items())
            longest, note = min(self.note_chars, replaced - 1), text_argument(arguments, "note")
            if len(note) > longest:
                raise ValueError(f"the note has {len(note)} characters, and at most {longest} are allowed here")
        return f"{plural(len(turns), 'turn')} left your context: {ranges(turns)}"


def prunings(units: Sequence[Unit]) -> tuple[Pruned, ...]:
    """The calls of an episode, in order, without those whose turns a later call took over with their note."""
    made: list[Pruned] = []
    for decision in decisions(units, PRUNE):
        turns = {turn for turn in _turns(decision.arguments) if turn < decision.turn}  # never the call itself
        taken = [call for call in made if call.note and call.turns[-1] in turns]
        every = turns.union(*(call.turns for call in taken))
        note = str(decision.arguments.get("note") or "").strip()
        made = [call for call in made if call not in taken]
        made.append(Pruned(decision.turn, tuple(sorted(every)), note))
    return tuple(made)


def _removed(calls: Sequence[Pruned]) -> tuple[set[int], dict[int, Pruned]]:
    """The turns that some calls removed, and the calls with a note, by the turn in whose place it is shown."""
    return {turn for call in calls for turn in call.turns}, {call.turns[-1]: call for call in calls if call.note}


def _turns(arguments: Mapping[str, object]) -> set[int]:
    turns = arguments.get("turns")
    if not isinstance(turns, list) or not turns or any(type(turn) is not int for turn in turns):
        raise ValueError(f"turns is {turns!r:.40}, wanted numbers of turns, as in [2, 3]")
    return set(turns)
