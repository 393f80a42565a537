"""Shared by the condensers of pictures: which pictures are old, what replaces them, and how many tokens they have."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import is_not

from condensegrpo.condensers.fit import fewest_rewritten
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


def rewrite_old_pictures(
    history: History,
    rewrite: Callable[[tuple[Unit, ...]], tuple[Unit, ...]],
    budget: Budget,
    *,
    keep: int,
    keep_first: int,
    drop_oldest: bool,
) -> tuple[Unit, ...]:
    """All units, with the old ones that show pictures rewritten; if that is over budget, see ``fewest_rewritten``.

    Args:
        rewrite: the first units of the history as they are shown when their pictures are old.
        keep: so many of the newest units that show a picture are not old.
        keep_first: nor are so many of the oldest. Over budget they are rewritten too, the oldest first, and never the
            newest unit of the history.
        drop_oldest: drop the oldest units if that is not enough.
    """
    units = history.units
    old, young = _by_age(units, keep=keep, keep_first=keep_first)
    order = [*old, *(index for index in young if index < len(units) - 1)]
    rewritten = rewrite(units[: max(order, default=-1) + 1])

    def shown(number: int) -> tuple[Unit, ...]:
        chosen = set(order[:number])
        return tuple(rewritten[index] if index in chosen else unit for index, unit in enumerate(units))

    numbers = range(len(old), len(order) + 1)
    return fewest_rewritten(history, shown, numbers, budget, drop_oldest=drop_oldest)


def old_units(units: Sequence[Unit], *, keep: int, keep_first: int) -> tuple[Unit, ...]:
    """The units whose pictures are old, see ``rewrite_old_pictures``."""
    return tuple(units[index] for index in _by_age(units, keep=keep, keep_first=keep_first)[0])


def reported(units: Sequence[Unit], shown: tuple[Unit, ...], verb: str) -> Condensed:
    """The rewritten units, with what was done to them."""
    dropped = len(units) - len(shown)
    changed = sum(map(is_not, shown, units[dropped:]))
    parts = [f"{verb} the pictures of {changed} of {len(units)} units"] if changed else []
    parts += [f"dropped the {dropped} oldest"] if dropped else []
    return Condensed(units=shown, reason=", ".join(parts))


def _by_age(units: Sequence[Unit], *, keep: int, keep_first: int) -> tuple[list[int], list[int]]:
    """The indices of units that show pictures: those that are old, and the others."""
    pictured = [index for index, unit in enumerate(units) if any(message.media for message in unit.results)]
    start = min(keep_first, len(pictured))
    end = max(len(pictured) - keep, start)
    return pictured[start:end], [*pictured[:start], *pictured[end:]]
