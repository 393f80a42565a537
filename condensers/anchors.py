"""The condenser that keeps the anchors of what another condenser leaves out: numbers, paths, errors, names, verbatim.

the wrapped condenser drops 0 and 1 and masks the result of 2, of five units
0  ls  ─▶  src/app.py src/db.py            ┐  Verbatim from omitted turns:  src/app.py  src/db.py  1142
1  make  ─▶  build 1142 …                  ┘  [2 turns up to 1 omitted, parts of them verbatim above: 96 tokens]
2  test  ─▶  KeyError: 'u_17' …               [turn 2, tool result omitted: 88 tokens] verbatim: KeyError: 'u_17'
3, 4                                          unchanged
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import attrgetter
from typing import Annotated, NamedTuple

from annotated_types import Gt, Lt

from condensegrpo.condensers.anchor_patterns import KINDS, Kind, anchors
from condensegrpo.condensers.fit import fits
from condensegrpo.condensers.pipeline import Pipeline
from condensegrpo.condensers.placeholder import VERBATIM, VERBATIM_LENGTH
from condensegrpo.condensers.truncate import Truncate
from condensegrpo.core.account import unit_tokens
from condensegrpo.core.messages import History, Message, Unit, flatten
from condensegrpo.core.protocols import Budget, Condensed, Stage
from condensegrpo.core.wording import counted

HEADING = "Verbatim from omitted turns:"


class Lost(NamedTuple):
    """An anchor that is in no shown message, and where it stood."""

    turn: int
    result: int | None  # of a masked result: its place in the unit; None: the unit is not shown
    text: str


@dataclass(frozen=True, slots=True)
class Anchors:
    """Keeps numbers, paths, errors, quotes, URLs and names of what its stages drop or mask, verbatim, beside them.

    Anchors of dropped units are listed in one unit at the place of the newest of them, and those of a masked result
    behind its placeholder. A new summary gets them at its end. Newest first, each once, and none that is shown anyway.
    """

    stages: Sequence[Stage] = (Stage(name="truncate", condenser=Truncate()),)  # as of a pipeline
    share: Annotated[float, Gt(0), Lt(1)] = 0.25  # of the budget, for anchors; the stages get the rest
    kinds: Sequence[Kind] = KINDS
    pipeline: Pipeline = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pipeline", Pipeline(self.stages))  # frozen

    @property
    def writes(self) -> int:
        """Texts that its stages may request from the policy in one call."""
        return self.pipeline.writes

    def check_room(self, pinned: Sequence[Message], budget: Budget) -> None:
        """Refuse a budget that one of its stages refuses."""
        self.pipeline.check_room(pinned, self._less(budget))

    def counts(self) -> Mapping[str, float]:
        """The counts of its stages."""
        return self.pipeline.counts()

    @property
    def scorers(self) -> Sequence[str]:
        """The scorers of its stages."""
        return self.pipeline.scorers

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The units of its stages and the anchors of what they left out.

        Costs two counts of what is shown, beside those of the stages, which are called again if the anchors leave half
        of their room; those that write are not.
        """
        view = history.current_units
        listed = next(
            (unit for unit in view if _is_list(unit)), None
        )  # of its own earlier answer, if that is asked for
        rest = tuple(unit for unit in view if unit is not listed)
        whole = fits(history, view, budget)
        past = history if listed is None else history.with_units(rest)
        condensed = await self.pipeline.condense(past, budget if whole else self._less(budget), tools)
        if condensed.units == rest:
            return replace(condensed, units=view) if whole else condensed
        answer, used = self._listed(history, condensed, budget)
        if used is None or whole or self.writes:
            return answer
        ample = replace(budget, tokens=budget.tokens - used)  # the anchors need less than half of their share
        return self._listed(history, await self.pipeline.condense(past, ample, tools), budget)[0]

    def _listed(self, history: History, condensed: Condensed, budget: Budget) -> tuple[Condensed, int | None]:
        """An answer of the stages with the anchors that fit; their tokens, if they leave half of their share.

        Lines are counted one by one, each once in an episode, and then all together.
        """
        room = int(self.share * budget.tokens)
        shown = flatten(history.pinned, condensed.units)
        lost = _lost(history, condensed, shown, tuple(self.kinds), room)
        note = _note(history, condensed, lost, budget)
        base, empty = budget.count(shown), budget.count((*history.pinned, replace(note, content="")))
        most = min(budget.tokens - base, room)

        def line(anchor: Lost) -> int:
            if anchor.text not in history.sizes:
                alone = (*history.pinned, replace(note, content=f"{anchor.text}\n"))
                history.sizes[anchor.text] = budget.count(alone) - empty
            return history.sizes[anchor.text]

        sums = list(accumulate(map(line, lost)))
        number = bisect_right(sums, most)
        while number:
            answer = _with(history, condensed, lost[:number], note)
            used = budget.count(flatten(history.pinned, answer.units)) - base
            if used <= most:
                return answer, used if number == len(lost) and 2 * used < room else None
            number = min(number - 1, max(bisect_right(sums, sums[number - 1] - (used - most)), 1))
        return condensed, None

    def _less(self, budget: Budget) -> Budget:
        return replace(budget, tokens=budget.tokens - int(self.share * budget.tokens))


def _is_list(unit: Unit) -> bool:
    return unit.is_summary and unit.reply.text.startswith(f"{HEADING}\n")


def _lost(
    history: History, condensed: Condensed, shown: Sequence[Message], kinds: tuple[Kind, ...], most: int
) -> list[Lost]:
    """Up to ``most`` anchors that are in no shown message, those of the newest units first, in a unit in order."""
    known = {anchor for message in shown for anchor in anchors(message.text, kinds)}
    lost: list[Lost] = []
    for turn, result, texts in _left_out(history, condensed, kinds):
        fresh = [text for text in texts if text not in known]
        known.update(fresh)
        lost += (Lost(turn, result, text) for text in fresh)
        if len(lost) >= most:
            break
    return lost[:most]


def _left_out(
    history: History, condensed: Condensed, kinds: tuple[Kind, ...]
) -> Iterator[tuple[int, int | None, Sequence[str]]]:
    """Turn, place of a masked result and anchors, the newest unit first; what an earlier summary covers is its own."""
    by_turn = {unit.turn: unit for unit in condensed.units}
    old = history.summary
    covered = old.through if old is not None and by_turn.get(old.through) == old.unit else -1
    for unit in reversed(history.units[bisect_right(history.units, covered, key=_turn) :]):
        shown = by_turn.get(unit.turn)
        if shown is None or shown.is_summary is not unit.is_summary:
            lines = unit.reply.text.splitlines()[1:] if _is_list(unit) else None
            texts = (text for message in unit.messages for text in anchors(message.text, kinds))
            yield unit.turn, None, lines or tuple(dict.fromkeys(texts))
        elif shown != unit:
            for place, (now, raw) in enumerate(zip(shown.results, unit.results, strict=True)):
                if now != raw:
                    yield unit.turn, place, anchors(raw.text, kinds)


def _note(history: History, condensed: Condensed, lost: Sequence[Lost], budget: Budget) -> Message:
    """What the list of anchors stands for: the units up to the newest that has one there."""
    newest = next((anchor.turn for anchor in lost if anchor.result is None), -1)
    kept = {unit.turn for unit in condensed.units}
    tokens = zip(history.units, unit_tokens(history, budget.count), strict=True)
    omitted = [count for unit, count in tokens if unit.turn <= newest and unit.turn not in kept]
    text = f"[{counted(len(omitted), 'turn', 'turns')} up to {newest} omitted, parts of them verbatim above: "
    return Message(role="user", content=f"{text}{sum(omitted)} tokens]")


def _with(history: History, condensed: Condensed, lost: Sequence[Lost], note: Message) -> Condensed:
    """An answer with these anchors: in a unit or the new summary, and behind placeholders."""
    chosen = sorted(lost, key=_turn)  # stable: in a unit in order
    listed = [anchor for anchor in chosen if anchor.result is None]
    text = "\n".join((HEADING, *(anchor.text for anchor in listed)))
    behind: dict[int, list[Lost]] = {}  # placeholders, by turn
    for anchor in chosen:
        if anchor.result is not None:
            behind.setdefault(anchor.turn, []).append(anchor)
    units, summary = (
        [_annotated(history, unit, behind.get(unit.turn, ())) for unit in condensed.units],
        condensed.summary,
    )
    if listed and summary is not None:
        place = condensed.units.index(summary.unit)
        summary = replace(summary, text=f"{summary.text}\n\n{text}")
        units[place] = summary.unit
    elif listed:
        reply = Message(role="assistant", content=text)
        units.append(Unit(turn=listed[-1].turn, reply=reply, results=(note,), is_summary=True))
    reason = "; ".join(
        (*filter(None, (condensed.reason,)), f"{counted(len(chosen), 'anchor', 'anchors')} of what was left out")
    )
    return replace(condensed, units=tuple(sorted(units, key=_turn)), summary=summary, reason=reason)


def _annotated(history: History, unit: Unit, own: Sequence[Lost]) -> Unit:
    """A unit with its anchors behind the placeholders of its results, as long as that is shorter than they were."""
    if not own:
        return unit
    raw = history.units[bisect_left(history.units, unit.turn, key=_turn)]
    results = list(unit.results)
    for anchor in own:
        place = anchor.result or 0
        before = results[place].text
        longer = f"{before}{'; ' if VERBATIM in before else VERBATIM}{anchor.text}"
        if len(longer) < min(len(raw.results[place].text), len(unit.results[place].text) + VERBATIM_LENGTH):
            results[place] = replace(results[place], content=longer)
    return replace(unit, results=tuple(results))


_turn = attrgetter("turn")
