"""Condensers of pictures: ``image_mask``, ``image_scale`` and ``image_caption``, with the options for old pictures.

``image_caption`` lets the policy write a line about pictures before they are omitted, in a condense turn, trained:

turn 4   act        … u3 with its picture                  → reply, which becomes u4 with a picture
turn 5   condense   … u3 with its picture, u4 "sum up"     → "the code is 4 7"    turn 4 continued by ids
turn 6   act        … u3 with the line and the text, u4    → reply                declared condensation
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from condensegrpo.condensers.fit import fewest_rewritten, fits, newest_that_fit, reported
from condensegrpo.condensers.summarising import finished_text
from condensegrpo.core.errors import SummaryRefused
from condensegrpo.core.messages import Caption, History, MediaPart, Message, Part, Rewrites, TextPart, Unit
from condensegrpo.core.protocols.condenser import Budget, Condensed, Count, Request, WrittenSummary
from condensegrpo.core.protocols.pictures import MediaStore

PictureOf = Callable[[Unit, Message, MediaPart], Part]  # what is shown for a picture of a message of a unit


def with_pictures(unit: Unit, part_of: PictureOf) -> Unit:
    """A unit with something else in the place of each picture of its results; its reply and all texts stay."""

    def part(message: Message, old: Part) -> Part:
        return part_of(unit, message, old) if isinstance(old, MediaPart) else old

    results = tuple(
        replace(message, content=tuple(part(message, old) for old in message.parts)) if message.media else message
        for message in unit.results
    )
    return unit if results == unit.results else replace(unit, results=results)


def omitted(history: History, unit: Unit, message: Message, picture: MediaPart, count: Count) -> Part:
    """The line in the place of a picture: ``[picture of turn 3 omitted: 1,240 tokens]``.

    The tokens are those that the picture adds to its message. A picture that is no longer than its line stays.
    """
    before = (*history.pinned, unit.reply)
    without, alone = (count((*before, replace(message, content=content))) for content in ("", (picture,)))
    line = TextPart(text=f"[picture of turn {unit.turn} omitted: {alone - without:,} tokens]")
    return line if count((*before, replace(message, content=line.text))) < alone else picture


def without_pictures(history: History, units: tuple[Unit, ...], count: Count) -> tuple[Unit, ...]:
    """Units with lines in the place of their pictures. Costs four counts for a new picture."""
    made = history.rewrites.setdefault(without_pictures, Rewrites())

    def line(unit: Unit, message: Message, picture: MediaPart) -> Part:
        return omitted(history, unit, message, picture, count)

    return made.of(units, lambda unit: with_pictures(unit, line))


@dataclass(frozen=True, slots=True, kw_only=True)
class OldPictures:
    """The options that say which pictures are old; pictures of all other units stay."""

    keep: Annotated[int, Ge(0)] = 1  # of the units that show a picture, so many of the newest stay
    keep_first: Annotated[int, Ge(0)] = 0  # and so many of the oldest

    def rewritten(
        self,
        history: History,
        rewrite: Callable[[tuple[Unit, ...]], tuple[Unit, ...]],
        budget: Budget,
        reason: str,
        *,
        drop_oldest: bool,
    ) -> Condensed:
        """All units, with the old ones that show pictures rewritten; if that is over budget, see ``fewest_rewritten``.

        Over budget the others are rewritten too, the oldest first, and never the newest unit of the history.

        Args:
            rewrite: the first units of the history as they are shown when their pictures are old.
            reason: what it does, see ``fit.reported``.
            drop_oldest: drop the oldest units if that is not enough.
        """
        units = history.units
        old, young = self.by_age(units)
        order = [*old, *(index for index in young if index < len(units) - 1)]
        rewritten = rewrite(units[: max(order, default=-1) + 1])

        def shown(number: int) -> tuple[Unit, ...]:
            chosen = set(order[:number])
            return tuple(rewritten[index] if index in chosen else unit for index, unit in enumerate(units))

        numbers = range(len(old), len(order) + 1)
        return reported(units, fewest_rewritten(history, shown, numbers, budget, drop_oldest=drop_oldest), reason)

    def by_age(self, units: Sequence[Unit]) -> tuple[list[int], list[int]]:
        """The indices of units that show pictures: those that are old, and the others."""
        pictured = [index for index, unit in enumerate(units) if any(message.media for message in unit.results)]
        start = min(self.keep_first, len(pictured))
        end = max(len(pictured) - self.keep, start)
        return pictured[start:end], [*pictured[:start], *pictured[end:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMask(OldPictures):
    """Replaces old pictures by ``[picture of turn 3 omitted: 1,240 tokens]``; replies and all texts stay.

    Pictures of the newest ``keep`` units that show any stay, and those of the oldest ``keep_first``. If that is over
    budget, these go too, the oldest first and never the newest unit's, and then the oldest units.
    """

    drop_oldest: bool = True  # False: only omit pictures, for a pipeline whose later stage fits the budget

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The units with lines for old pictures. Costs four counts for a new picture."""
        return self.rewritten(
            history,
            lambda units: without_pictures(history, units, budget.count),
            budget,
            "omitted the pictures",
            drop_oldest=self.drop_oldest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageScale(OldPictures):
    """Shows old pictures with ``scale`` times their width and height; replies and all texts stay.

    Which are old is as in ``image_mask``. A smaller picture is a PNG file of its own, stored like any other; whether it
    has fewer tokens is up to the model: those that show every picture at one size gain nothing. In a pipeline a later
    stage may omit what is still too long.
    """

    scale: Annotated[float, Gt(0), Lt(1)] = 0.5
    drop_oldest: bool = True  # False: only scale, for a pipeline whose later stage fits the budget

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The units with smaller old pictures. A picture is scaled once in an episode."""

        def smaller(unit: Unit, message: Message, picture: MediaPart) -> MediaPart:
            if budget.media is None:
                raise ValueError("image_scale scales pictures, and the budget has no store with their bytes")
            return _scaled(budget.media, picture, self.scale)

        scaled = history.rewrites.setdefault((ImageScale, self.scale), Rewrites())
        return self.rewritten(
            history,
            lambda units: scaled.of(units, lambda unit: with_pictures(unit, smaller)),
            budget,
            "scaled the pictures",
            drop_oldest=self.drop_oldest,
        )


def _scaled(media: MediaStore, picture: MediaPart, scale: float) -> MediaPart:
    """A smaller picture, stored; one of a single pixel stays."""
    from PIL import Image  # here: runs without pictures do not need it

    with Image.open(io.BytesIO(media.read(picture.sha256))) as image:  # decoded before, when it was shown
        size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
        if size == image.size:
            return picture
        small, file = image.convert("RGB").resize(size), io.BytesIO()
    small.save(file, format="PNG")
    return media.write(MediaPart.of(file.getvalue(), "image/png"))


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
        old = tuple(history.units[index] for index in self.by_age(history.units)[0])
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


def _usable(written: WrittenSummary, unit: Unit, history: History, budget: Budget) -> str:
    """The line in a text, without the thinking before it."""
    text = " ".join(finished_text(written).split())
    (line,) = without_pictures(history, (unit,), budget.count)
    before, after = (budget.count((*history.pinned, *shown.messages)) for shown in (unit, _captioned(line, text)))
    if after >= before:
        raise SummaryRefused(f"it is not shorter than the pictures: {after} tokens after, {before} before")
    return text
