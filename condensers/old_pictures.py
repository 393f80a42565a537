"""Shared by the condensers of pictures: which pictures are old, what replaces them, and how many tokens they have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from condensegrpo.condensers.fit import fewest_rewritten, reported
from condensegrpo.core.messages import History, MediaPart, Message, Part, Rewrites, TextPart, Unit
from condensegrpo.core.protocols.condenser import Budget, Condensed, Count

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

    def old_units(self, units: Sequence[Unit]) -> tuple[Unit, ...]:
        """The units whose pictures are old."""
        return tuple(units[index] for index in self._by_age(units)[0])

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
        old, young = self._by_age(units)
        order = [*old, *(index for index in young if index < len(units) - 1)]
        rewritten = rewrite(units[: max(order, default=-1) + 1])

        def shown(number: int) -> tuple[Unit, ...]:
            chosen = set(order[:number])
            return tuple(rewritten[index] if index in chosen else unit for index, unit in enumerate(units))

        numbers = range(len(old), len(order) + 1)
        return reported(units, fewest_rewritten(history, shown, numbers, budget, drop_oldest=drop_oldest), reason)

    def _by_age(self, units: Sequence[Unit]) -> tuple[list[int], list[int]]:
        """The indices of units that show pictures: those that are old, and the others."""
        pictured = [index for index, unit in enumerate(units) if any(message.media for message in unit.results)]
        start = min(self.keep_first, len(pictured))
        end = max(len(pictured) - self.keep, start)
        return pictured[start:end], [*pictured[:start], *pictured[end:]]
