"""Condensers of pictures: ``image_mask``, ``image_scale`` and ``image_caption``, with the options for old pictures.

``image_caption`` lets the policy write a line about pictures before they are omitted, in a condense turn, trained:

    turn 4   act        … u3 with its picture                  → reply, which becomes u4 with a picture
    turn 5   condense   … u3 with its picture, u4 "sum up"     → "the code is 4 7"    turn 4 continued by ids
    turn 6   act        … u3 with the line and the text, u4    → reply                declared condensation
"""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from condensegrpo.condensers.fit import most_rewritten, newest_that_fit, reported
from condensegrpo.condensers.summarising import finished_text
from condensegrpo.core.condenser import Budget, Condensed, Condenser, Request, WrittenSummary
from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.messages import Caption, History, MediaPart, Part, TextPart, Unit
from condensegrpo.core.protocols.pictures import MediaStore

PictureOf = Callable[[MediaPart], Part]  # what is shown for a picture


def with_pictures(unit: Unit, part_of: PictureOf, *, share: float = 0.0) -> Unit:
    """A unit with something else in the place of each picture of its results; its reply and all texts stay.

    ``share``: of the tokens of its pictures, those of the new parts.
    """

    def part(old: Part) -> Part:
        return part_of(old) if isinstance(old, MediaPart) else old

    results = tuple(
        replace(message, content=tuple(map(part, message.parts))) if message.media else message
        for message in unit.results
    )
    if results == unit.results:
        return unit
    return unit.with_results(results, media_tokens=round(share * unit.media_tokens))


def without_pictures(unit: Unit) -> Unit:
    """A unit with a line in the place of each picture: ``[picture of turn 3 omitted: 1,240 tokens]``.

    Pictures that are no longer than their line stay.
    """
    pictures = max(sum(len(message.media) for message in unit.results), 1)
    line = TextPart(text=f"[picture of turn {unit.turn} omitted: {unit.media_tokens // pictures:,} tokens]")
    omitted = with_pictures(unit, lambda _: line)
    return omitted if omitted.tokens < unit.tokens else unit


@dataclass(frozen=True, kw_only=True)
class PictureCondenser(Condenser):
    """The options that say which pictures are old; pictures of all other units stay."""

    keep: Annotated[int, Ge(0)] = 1  # of the units that show a picture, so many of the newest stay
    keep_first: Annotated[int, Ge(0)] = 0  # and so many of the oldest

    def rewritten(
        self, history: History, rewrite: Callable[[Unit], Unit], budget: Budget, reason: str, *, drop_oldest: bool
    ) -> Condensed:
        """All units, with the old ones that show pictures rewritten; if that is over budget, see ``most_rewritten``.

        Over budget the others are rewritten too, the oldest first, and never the newest unit of the history.

        Args:
            rewrite: a unit as it is shown when its pictures are old.
            reason: what it does, see ``fit.reported``.
            drop_oldest: drop the oldest units if that is not enough.
        """
        units = history.units
        old, young = self.by_age(units)
        spare = [index for index in reversed(young) if index < len(units) - 1]
        changed = {*old, *spare}

        def shown(index: int) -> Unit:
            return rewrite(units[index]) if index in changed else units[index]

        return reported(units, most_rewritten(units, shown, spare, budget.tokens, drop_oldest=drop_oldest), reason)

    def by_age(self, units: Sequence[Unit]) -> tuple[list[int], list[int]]:
        """The indices of units that show pictures: those that are old, and the others."""
        pictured = [index for index, unit in enumerate(units) if any(message.media for message in unit.results)]
        start = min(self.keep_first, len(pictured))
        end = max(len(pictured) - self.keep, start)
        return pictured[start:end], [*pictured[:start], *pictured[end:]]


@dataclass(frozen=True, kw_only=True)
class ImageMask(PictureCondenser):
    """Replaces old pictures by ``[picture of turn 3 omitted: 1,240 tokens]``; replies and all texts stay.

    Pictures of the newest ``keep`` units that show any stay, and those of the oldest ``keep_first``. If that is over
    budget, these go too, the oldest first and never the newest unit's, and then the oldest units.
    """

    drop_oldest: bool = True  # False: only omit pictures, for a pipeline whose later stage fits the budget

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The units with lines for old pictures."""
        return self.rewritten(history, without_pictures, budget, "omitted the pictures", drop_oldest=self.drop_oldest)


@dataclass(frozen=True, kw_only=True)
class ImageScale(PictureCondenser):
    """Shows old pictures with ``scale`` times their width and height; replies and all texts stay.

    Which are old is as in ``image_mask``. A smaller picture is a PNG file of its own, stored like any other; whether it
    has fewer tokens is up to the model: those that show every picture at one size gain nothing. In a pipeline a later
    stage may omit what is still too long.
    """

    scale: Annotated[float, Gt(0), Lt(1)] = 0.5
    drop_oldest: bool = True  # False: only scale, for a pipeline whose later stage fits the budget

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The units with smaller old pictures."""

        def smaller(picture: MediaPart) -> MediaPart:
            if budget.media is None:
                raise ValueError("image_scale scales pictures, and the budget has no store with their bytes")
            return _scaled(budget.media, picture.sha256, picture.type, self.scale)  # type: ignore[arg-type]  # by identity

        def scaled(unit: Unit) -> Unit:
            return with_pictures(unit, smaller, share=self.scale**2)

        return self.rewritten(history, scaled, budget, "scaled the pictures", drop_oldest=self.drop_oldest)


@lru_cache(maxsize=1024)
def _scaled(media: MediaStore, sha256: str, kind: str, scale: float) -> MediaPart:
    """A smaller picture, stored; one of a single pixel stays."""
    from PIL import Image  # here: runs without pictures do not need it

    with Image.open(io.BytesIO(media.read(sha256))) as image:  # decoded before, when it was shown
        size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
        if size == image.size:
            return MediaPart(sha256=sha256, type=kind)
        small, file = image.convert("RGB").resize(size), io.BytesIO()
    small.save(file, format="PNG")
    return media.write(MediaPart.of(file.getvalue(), "image/png"))


INSTRUCTION = "Write one line with what you need later of the pictures of {turns}: they will be omitted."


@dataclass(frozen=True, kw_only=True)
class ImageCaption(PictureCondenser):
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

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The units with lines and captions for old pictures."""
        described = history.captions[-1].turn if history.captions else -1
        old = tuple(history.units[index] for index in self.by_age(history.units)[0])
        leaving = tuple(unit for unit in old if unit.turn > described)
        captions, rejected = tuple[Caption, ...](), tuple[str, ...]()
        if leaving and budget.write is not None:
            text = ""
            with suppress(SummaryRefused):  # the request does not fit
                written = await budget.write(self._request(history, old[: -len(leaving)], leaving, budget))
                try:
                    text = _usable(written, leaving[-1])
                except SummaryRefused as refusal:
                    rejected = (str(refusal),)
            captions = (Caption(turn=leaving[-1].turn, text=text),)
        texts = _texts(history.with_captions(captions))
        condensed = self.rewritten(
            history, lambda unit: _described(unit, texts), budget, "described the pictures", drop_oldest=True
        )
        return replace(condensed, captions=captions, rejected=rejected)

    def _request(
        self, history: History, earlier: tuple[Unit, ...], leaving: tuple[Unit, ...], budget: Budget
    ) -> Request:
        """The request after what the last prompt showed and the newest unit."""
        turns = " and ".join(f"turn {unit.turn}" for unit in leaving)
        texts = _texts(history)
        described = {unit.turn: _described(unit, texts) for unit in earlier}
        text = INSTRUCTION.format(turns=turns)
        shown = [described.get(unit.turn, unit) for unit in history.units]
        room = budget.tokens - history.units[-1].estimate(text)
        units = newest_that_fit(shown, room)
        if leaving[0] not in units:
            raise SummaryRefused("the request does not fit")
        return Request(units=units, instruction=text, max_tokens=self.max_tokens)


def _texts(history: History) -> Mapping[int, str]:
    """The captions by turn."""
    return {caption.turn: caption.text for caption in history.captions if caption.text}


def _described(unit: Unit, texts: Mapping[int, str]) -> Unit:
    """A unit with lines in the place of its pictures, followed by its caption."""
    line = without_pictures(unit)
    if unit.turn not in texts:
        return line
    *before, last = line.results
    return line.with_results((*before, last.followed_by(f" {texts[unit.turn]}")))


def _usable(written: WrittenSummary, unit: Unit) -> str:
    """The line in a text, without the thinking before it."""
    text = " ".join(finished_text(written).split())
    tokens = unit.estimate(text) if written.tokens is None else written.tokens
    if tokens >= unit.media_tokens:
        raise SummaryRefused(f"it is not shorter than the pictures: {tokens} tokens, and they have {unit.media_tokens}")
    return text
