"""Condensers that show the policy again its named notes (``memory``) or an omitted observation (``recall``).

turn   0              1       2       3
       write("a", …)  search  search  search
view before turn 3:  0 1 2        of turn 4, if 0 and 1 are dropped:  2 + "Your notes: a: …"  3
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from annotated_types import Ge

from condensegrpo.condensers.decisions import decision_tool, decisions, text_argument
from condensegrpo.condensers.fit import newest_that_fit, total
from condensegrpo.core.condenser import Budget, Condensed, Condenser
from condensegrpo.core.messages import RECALLED, History, Unit, bare
from condensegrpo.core.protocols.tool import EnvironmentTool, ToolResult
from condensegrpo.core.wording import plural, ranges

WRITE, READ, DELETE = "memory_write", "memory_read", "memory_delete"
HEADING = "[Your notes]"


class Note(NamedTuple):
    """A note of the policy."""

    turn: int  # that wrote it
    text: str


@dataclass(frozen=True)
class Memory(Condenser):
    """Keeps the notes that the policy writes: they are shown after the oldest unit, unless their turns are in view.

    Then it drops the oldest units until the rest fits, a summary last. The notes themselves are dropped, the oldest
    first, only if they do not fit beside the newest unit. In a pipeline it comes after the stages that drop units.
    """

    note_chars: Annotated[int, Ge(1)] = 400  # longest note, its name included, in characters
    total_chars: Annotated[int, Ge(1)] = 2000  # all notes together

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The units with the notes whose turns are not among them."""
        notes, view = notes_of(history.raw_units), history.current_units
        head = view[:1] if len(view) > 1 and view[0].is_note else ()
        tail, most = list(newest_that_fit(view[len(head) :], budget.tokens - total(head))), len(notes)
        while len(tail) > 1 and total(_with_notes((*head, *tail), notes, most)) > budget.tokens:
            del tail[0]
        while most and total(_with_notes((*head, *tail), notes, most)) > budget.tokens:
            most -= 1
        units = _with_notes((*head, *tail), notes, most)
        if head and total(units) > budget.tokens:
            units = tuple(tail)
        return Condensed(units=units, reason=_reason(view, units, notes, most))

    def tools(self) -> Sequence[EnvironmentTool]:
        """``memory_write``, ``memory_read`` and ``memory_delete``."""
        name = {"type": "string", "description": "The name of the note."}
        text = {"type": "string", "description": "Its text; it replaces a note of the same name."}
        lasting = "Notes stay in your context when the turns that wrote them leave it."
        return (
            decision_tool(WRITE, f"Writes a note. {lasting}", {"name": name, "text": text}, self._written),
            decision_tool(READ, "Reads a note.", {"name": name}, _read),
            decision_tool(DELETE, "Deletes a note.", {"name": name}, _deleted),
        )

    def _written(self, arguments: Mapping[str, object], history: History) -> str:
        name, text = text_argument(arguments, "name"), text_argument(arguments, "text")
        others = {other: note for other, note in notes_of(history.raw_units).items() if other != name}
        size, used = len(name) + len(text), sum(len(other) + len(note.text) for other, note in others.items())
        if size > self.note_chars:
            raise ValueError(f"the note has {size} characters with its name, and at most {self.note_chars} are allowed")
        if used + size > self.total_chars:
            raise ValueError(
                f"the note has {size} characters, the others ({', '.join(others)}) have {used}, and together "
                f"{self.total_chars} are allowed; delete some with {DELETE}"
            )
        return f"The note is written; {self.total_chars - used - size} characters are left."


def notes_of(units: Sequence[Unit]) -> dict[str, Note]:
    """The notes of an episode by name, in the order in which they were written."""
    notes: dict[str, Note] = {}
    for decision in decisions(units, WRITE, DELETE):
        name = str(decision.arguments.get("name")).strip()
        notes.pop(name, None)
        if decision.name == WRITE:
            notes[name] = Note(decision.turn, str(decision.arguments.get("text")).strip())
    return notes


def _existing(arguments: Mapping[str, object], history: History) -> Note:
    notes, name = notes_of(history.raw_units), text_argument(arguments, "name")
    if name not in notes:
        raise ValueError(f"there is no note {name!r:.40}; the notes are: {', '.join(notes) or 'none'}")
    return notes[name]


def _read(arguments: Mapping[str, object], history: History) -> str:
    return _existing(arguments, history).text


def _deleted(arguments: Mapping[str, object], history: History) -> str:
    _existing(arguments, history)
    return "The note is deleted."


def _reason(view: Sequence[Unit], units: Sequence[Unit], notes: Mapping[str, Note], most: int) -> str:
    names, dropped = _hidden(units, notes), len(view) - len(units)
    shown = names[max(len(names) - most, 0) :]
    parts = [f"dropped the {dropped} oldest"] if dropped else []
    parts += [f"showed the policy's notes {', '.join(shown)} again"] if shown else []
    parts += [f"{plural(len(names) - len(shown), 'note does', 'notes do')} not fit"] if len(names) > len(shown) else []
    return "; ".join(parts)


def _hidden(units: Sequence[Unit], notes: Mapping[str, Note]) -> list[str]:
    turns = {unit.turn for unit in units if not unit.is_note}
    return [name for name, note in notes.items() if note.turn not in turns]


def _with_notes(units: tuple[Unit, ...], notes: Mapping[str, Note], most: int) -> tuple[Unit, ...]:
    """Units with the newest ``most`` of the notes that they do not show, after the first that is no summary."""
    names = _hidden(units, notes)
    index = next((index for index, unit in enumerate(units) if not unit.is_note), None)
    names = names[max(len(names) - most, 0) :]
    if index is None or not names:
        return units
    text = "\n".join((HEADING, *(f"{name}: {notes[name].text}" for name in names)))
    return (*units[:index], units[index].with_instruction(text), *units[index + 1 :])


@dataclass(frozen=True)
class Recall(Condenser):
    """Answers the policy's ``recall(turn)`` with what answered the reply of that turn, if a condenser left it out.

    The answer is a result like any other: it ages, and condensers mask or drop it. Every answer counts as a refetch.
    """

    max_chars: Annotated[int, Ge(1)] = 1000  # of an answer; of a longer observation its beginning

    async def condense(self, history: History, budget: Budget) -> Condensed:
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
        if any(unit.turn == turn and _shows(unit, units[turn]) for unit in history.visible_units):
            raise ValueError(f"turn {turn} is in your context; read it there")
        text = "\n".join(map(bare, units[turn].results))
        rest = len(text) - self.max_chars
        cut = f"\n[… {rest} characters left out …]" if rest > 0 else ""
        pictures = tuple(part for message in units[turn].results for part in message.media)
        return ToolResult(text=f"{RECALLED}{turn}]\n{text[: self.max_chars]}{cut}", media=pictures)


def _shows(shown: Unit, raw: Unit) -> bool:
    """Whether a shown unit has the results of the raw one, with or without notes after them."""
    pairs = zip(shown.results, raw.results, strict=False)
    return not shown.is_note and all(now.text.startswith(before.text) for now, before in pairs)
