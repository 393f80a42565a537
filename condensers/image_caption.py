"""The condenser for which the policy writes a line about pictures before they are omitted: a condense turn, trained.

turn 4   act        … u3 with its picture                  → reply, which becomes u4 with a picture
turn 5   condense   … u3 with its picture, u4 "sum up"     → "the code is 4 7"    turn 4 continued by ids
turn 6   act        … u3 with the line and the text, u4    → reply                declared condensation
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from condensegrpo.condensers.fit import fits, newest_that_fit
from condensegrpo.condensers.old_pictures import OldPictures, without_pictures
from condensegrpo.condensers.summarising import finished_text
from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.messages import Caption, History, Unit
from condensegrpo.core.protocols.condenser import Budget, Condensed, Request, Written

INSTRUCTION = "Write one line with what you need later of the pictures of {turns}: they will be omitted."


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCaption(OldPictures):
    """Replaces old pictures by a line, as ``image_mask``, and asks the policy before for a text that stays after it.

    One text is asked for in a turn, about all pictures that become old in it. A text that was cut off, is empty or is
    not shorter than the pictures' unit is rejected and trains nothing; the line alone is shown then. So it is if the
    request does not fit. Pictures that are omitted early because of the budget get no text then.
    """

    max_tokens: Annotated[int, Ge(1)] = 64  # of a text; never more than a reply may have

    @property
    def writes(self) -> int:
        """Texts that one call may request."""
        return 1

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The units with lines and captions for old pictures."""
        described = history.captions[-1].turn if history.captions else -1
        old = self.old_units(history.units)
        leaving = tuple(unit for unit in old if unit.turn > described)
        captions, rejected = tuple[Caption, ...](), tuple[str, ...]()
        if leaving and budget.write is not None:
            text = ""
            if request := self._request(history, old[: -len(leaving)], leaving, budget):
                try:
                    text = _usable(await budget.write(request), leaving[-1], history, budget)
                except SummaryRefused as refusal:
                    rejected = (str(refusal),)
            captions = (Caption(turn=leaving[-1].turn, text=text),)
        captioned = history.with_captions(captions)
        condensed = self.rewritten(
            history,
            lambda units: _described(captioned, units, budget),
            budget,
            "described the pictures",
            drop_oldest=True,
        )
        return replace(condensed, captions=captions, rejected=rejected)

    def _request(
        self, history: History, earlier: tuple[Unit, ...], leaving: tuple[Unit, ...], budget: Budget
    ) -> Request | None:
        """The request after what the last prompt showed and the newest unit; None if that does not fit."""
        text = INSTRUCTION.format(turns=" and ".join(f"turn {unit.turn}" for unit in leaving))
        described = {unit.turn: unit for unit in _described(history, earlier, budget)}
        *before, newest = (described.get(unit.turn, unit) for unit in history.units)
        requested = (*before, newest.with_instruction(text))
        room = replace(budget, tokens=budget.request_tokens or budget.tokens)
        units = newest_that_fit(history, requested, room)
        if leaving[0] not in units or not fits(history, units, room):
            return None
        return Request(units=(*units[:-1], newest), instruction=text, max_tokens=self.max_tokens)


def _described(history: History, units: tuple[Unit, ...], budget: Budget) -> tuple[Unit, ...]:
    """Units with lines in the place of their pictures, followed by their captions."""
    texts = {caption.turn: caption.text for caption in history.captions if caption.text}
    return tuple(
        _captioned(unit, texts[unit.turn]) if unit.turn in texts else unit
        for unit in without_pictures(history, units, budget.count)
    )


def _captioned(unit: Unit, text: str) -> Unit:
    *before, last = unit.results
    return replace(unit, results=(*before, last.followed_by(f" {text}")))


def _usable(written: Written, unit: Unit, history: History, budget: Budget) -> str:
    """The line in a text, without the thinking before it.

    Raises:
        SummaryRefused: it was cut off, is empty, or is not shorter than what it replaces.
    """
    text = " ".join(finished_text(written).split())
    (line,) = without_pictures(history, (unit,), budget.count)
    before, after = (budget.count((*history.pinned, *shown.messages)) for shown in (unit, _captioned(line, text)))
    if after >= before:
        raise SummaryRefused(f"it is not shorter than the pictures: {after} tokens after, {before} before")
    return text
