"""The condenser that keeps the anchors of what another condenser leaves out: numbers, paths, errors, names, verbatim.

An anchor is a part of a text that a summary in other words would lose:

    Build 1142 failed: ValueError: bad id 'u_17' in src/app.py:88
    number 1142 · error ValueError: bad id 'u_17' in src/app.py:88

They are kept beside what is shown:

    the wrapped condenser drops 0 and 1 and masks the result of 2, of five units
    0  ls  ─▶  src/app.py src/db.py            ┐  Verbatim from omitted turns:  src/app.py  src/db.py  1142
    1  make  ─▶  build 1142 …                  ┘  [turns up to 1 omitted, parts of them verbatim above: 96 tokens]
    2  test  ─▶  KeyError: 'u_17' …               [turn 2, tool result omitted: 88 tokens] verbatim: KeyError: 'u_17'
    3, 4                                          unchanged
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Annotated, Literal, NamedTuple

from annotated_types import Gt, Lt

from condensegrpo.condensers.fit import total
from condensegrpo.condensers.observation_mask import VERBATIM, VERBATIM_LENGTH
from condensegrpo.condensers.pipeline import Pipeline
from condensegrpo.condensers.whole_units import Truncate
from condensegrpo.core.condenser import Budget, Condensed, Count, Stage
from condensegrpo.core.messages import LEAST_DENSITY, History, Message, Unit, flatten, note, without_meter
from condensegrpo.core.wording import plural

HEADING = "Verbatim from omitted turns:"
Kind = Literal["url", "error", "quote", "path", "number", "identifier", "name"]
KINDS: tuple[Kind, ...] = ("url", "error", "quote", "path", "number", "identifier", "name")

# every repetition is bounded, so that no text takes longer than its length times a constant
_PATTERNS: dict[Kind, str] = {  # the first that matches at a place wins
    "url": r"https?://[^\s<>\"'`)\]}]{1,200}(?![^\s<>\"'`)\]}])|\w[\w.+-]{0,60}@[\w-]{1,60}(?:\.[\w-]{1,20}){1,4}(?!\w)",
    "error": r"(?:[\w.]{0,60}(?:Error|Exception|Warning)|(?i:error|fatal|failed))\b: [^\n]{1,160}",
    "quote": r"\"[^\"\n]{1,80}\"(?:\s?:)?|`[^`\n]{1,80}`|“[^”\n]{1,80}”",
    "path": r"(?=[~./\\]|\S{0,60}[._\d]|\w{1,60}[/\\]\w{1,60}[/\\])"  # and/or is none
    r"(?:(?:~|\.{1,2}|[A-Za-z]:)?[/\\])?\.?\w[\w.@+-]{0,60}(?:[/\\][\w.@+-]{1,60}){1,12}(?::\d{1,6}){0,2}(?!\w)"
    r"|(?:~|\.{1,2})?[/\\]\.?\w[\w.@+-]{0,60}(?!\w)|\w[\w-]{1,60}\.[A-Za-z]\w{0,4}(?::\d{1,6}){0,2}(?!\w)",
    "number": r"[$€£]?[-+]?\d{1,30}(?:[.,:/-]\d{1,30}){0,6}[%A-Za-z]{0,3}(?![.,:/-]?\w)",
    "identifier": r"(?=\w{0,60}[_\d]|\w{0,60}[a-z][A-Z]|[A-Z]{2})\w{2,60}(?:-\w{1,30}){0,5}(?!\w)",
    "name": r"(?<=[\w,;’'] )(?!I\b)[A-Z][\w’'-]{1,30}(?: [A-Z][\w’'-]{1,30}){0,3}(?!\w)",
}


class LostAnchor(NamedTuple):
    """An anchor that is in no shown message, and where it stood."""

    turn: int
    result: int | None  # index in the unit of a masked result; None: the unit is not shown
    text: str


@dataclass(frozen=True)
class Anchors(Pipeline):
    """Keeps numbers, paths, errors, quotes, URLs and names of what its stages drop or mask, verbatim, beside them.

    Anchors of dropped units are listed in one unit where the newest of them stood, and those of a masked result
    behind its placeholder. A new summary gets them at its end. Newest first, each once, and none that is shown anyway.
    """

    stages: Sequence[Stage] = (Stage(name="truncate", condenser=Truncate()),)  # as of a pipeline
    share: Annotated[float, Gt(0), Lt(1)] = 0.25  # of the budget, for anchors; the stages get the rest
    kinds: Sequence[Kind] = KINDS

    def check(self, pinned: Sequence[Message], budget: Budget, count: Count) -> None:
        """Refuse a budget that one of its stages refuses."""
        super().check(pinned, self._less(budget), count)

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The units of its stages and the anchors of what they left out.

        The stages are called again if the anchors leave half of their room; those that write are not.
        """
        view = history.current_units
        listed = next((unit for unit in view if _is_list(unit)), None)  # of its earlier answer
        rest = tuple(unit for unit in view if unit is not listed)
        fits = total(view) <= budget.tokens
        past = history if listed is None else history.with_units(rest)
        condensed = await super().condense(past, budget if fits else self._less(budget))
        if condensed.units == rest:
            return replace(condensed, units=view) if fits else condensed
        answer, used = self._with_anchors(history, condensed, budget)
        if used is None or fits or self.writes:
            return answer
        ample = replace(budget, tokens=budget.tokens - used)  # the anchors need less than half of their share
        return self._with_anchors(history, await super().condense(past, ample), budget)[0]

    def _with_anchors(self, history: History, condensed: Condensed, budget: Budget) -> tuple[Condensed, int | None]:
        """An answer of the stages with the anchors that fit; their tokens, if they leave half of their share."""
        share, base = int(self.share * budget.tokens), total(condensed.units)
        lost = _lost_anchors(history, condensed, tuple(self.kinds), share)
        room, density = min(budget.tokens - base, share), max(history.units[-1].rates[0], LEAST_DENSITY)
        sums = list(accumulate((len(anchor.text) + 1) * density for anchor in lost))
        number = bisect_right(sums, room)
        while number:
            answer = _answer_with(history, condensed, lost[:number])
            used = total(answer.units) - base
            if used <= room:
                return answer, used if number == len(lost) and 2 * used < share else None
            number = min(number - 1, max(bisect_right(sums, sums[number - 1] - (used - room)), 1))
        return condensed, None

    def _less(self, budget: Budget) -> Budget:
        return replace(budget, tokens=budget.tokens - int(self.share * budget.tokens))


def _is_list(unit: Unit) -> bool:
    return unit.is_note and unit.reply.text.startswith(f"{HEADING}\n")


def _lost_anchors(history: History, condensed: Condensed, kinds: tuple[Kind, ...], most: int) -> list[LostAnchor]:
    """Up to ``most`` anchors that are in no shown message, those of the newest units first, in a unit in order."""
    shown = flatten(history.pinned, condensed.units)
    known = {anchor for message in shown for anchor in anchors(message.text_without_media, kinds)}
    lost: list[LostAnchor] = []
    for turn, result, texts in _left_out(history, condensed, kinds):
        fresh = [text for text in texts if text not in known]
        known.update(fresh)
        lost += (LostAnchor(turn, result, text) for text in fresh)
        if len(lost) >= most:
            break
    return lost[:most]


def _left_out(
    history: History, condensed: Condensed, kinds: tuple[Kind, ...]
) -> Iterator[tuple[int, int | None, Sequence[str]]]:
    """Turn, index of a masked result and anchors, the newest unit first; an earlier summary covers what it covers."""
    by_turn = {unit.turn: unit for unit in condensed.units}
    old = history.note
    covered = old.turn if old is not None and by_turn.get(old.turn) == old else -1
    for unit in reversed(history.units[bisect_right(history.units, covered, key=_turn) :]):
        shown = by_turn.get(unit.turn)
        replaced = shown is not None and shown.is_note is not unit.is_note
        if shown is None or (replaced and condensed.note is not None):
            lines = unit.reply.text.splitlines()[1:] if _is_list(unit) else None
            texts = (text for message in unit.messages for text in anchors(message.text_without_media, kinds))
            yield unit.turn, None, lines or tuple(dict.fromkeys(texts))
        elif not replaced and shown != unit:  # replaced: a note of the policy stands in its place
            for index, (now, raw) in enumerate(zip(shown.results, unit.results, strict=False)):
                if now != raw:
                    yield unit.turn, index, anchors(raw.text_without_media, kinds)


def _answer_with(history: History, condensed: Condensed, lost: Sequence[LostAnchor]) -> Condensed:
    """An answer with these anchors: in a unit or the new summary, and behind placeholders."""
    chosen = sorted(lost, key=_turn)  # stable: in a unit in order
    listed = [anchor for anchor in chosen if anchor.result is None]
    text = "\n".join((HEADING, *(anchor.text for anchor in listed)))
    masked: dict[int, list[LostAnchor]] = {}  # anchors of masked results, by turn
    for anchor in chosen:
        if anchor.result is not None:
            masked.setdefault(anchor.turn, []).append(anchor)
    units = [_annotated(history, unit, masked.get(unit.turn, ())) for unit in condensed.units]
    summary = condensed.note
    if listed and summary is not None:
        index = condensed.units.index(summary)
        reply = replace(summary.reply, content=f"{summary.reply.text}\n\n{text}")
        summary = replace(summary, reply=reply, tokens=summary.tokens + history.units[-1].estimate(text))
        units[index] = summary
    elif listed:
        kept = {unit.turn for unit in condensed.units}
        omitted = [unit for unit in history.units if unit.turn <= listed[-1].turn and unit.turn not in kept]
        units.append(note(history, omitted, text, how="parts of them verbatim above"))
    reason = "; ".join((*filter(None, (condensed.reason,)), f"{plural(len(chosen), 'anchor')} of what was left out"))
    return replace(condensed, units=tuple(sorted(units, key=_turn)), note=summary, reason=reason)


def _annotated(history: History, unit: Unit, lost: Sequence[LostAnchor]) -> Unit:
    """A unit with its anchors behind the placeholders of its results, as long as that is shorter than they were."""
    if not lost:
        return unit
    raw = history.units[bisect_left(history.units, unit.turn, key=_turn)]
    results = list(unit.results)
    for anchor in lost:
        index = anchor.result or 0
        before = results[index].text
        annotated = f"{before}{'; ' if VERBATIM in before else VERBATIM}{anchor.text}"
        longest = min(len(raw.results[index].text), len(unit.results[index].text) + VERBATIM_LENGTH)
        if len(annotated) < longest:
            results[index] = replace(results[index], content=annotated)
    return unit.with_results(tuple(results))


@lru_cache(maxsize=8192)
def anchors(text: str, kinds: tuple[Kind, ...] = KINDS) -> tuple[str, ...]:
    """The anchors of a text, verbatim, each once, in order. An error message is cut after 160 characters."""
    matches = (match[0].rstrip() for match in _compiled(kinds).finditer(without_meter(text)))
    bare = (match.strip('“”"`') for match in matches if not match.endswith('":'))  # a key of JSON
    stripped = (match.lstrip(" ,;:").rstrip(" .,;:") for match in bare)
    return tuple(dict.fromkeys(anchor for anchor in stripped if anchor))


@lru_cache(maxsize=64)
def _compiled(kinds: Sequence[Kind]) -> re.Pattern[str]:
    return re.compile("|".join(rf"(?<!\w)(?:{pattern})" for kind, pattern in _PATTERNS.items() if kind in kinds))


_turn = attrgetter("turn")
