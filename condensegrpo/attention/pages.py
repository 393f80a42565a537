"""Cuts a rendered history into pages that can be read at once. Pure functions of token ids.

    history  pinned u0 u1 u2 u3 u4          u4 is the newest: its reply is the last output
    pages    pinned u0 u1 u4                as many units as fit, in order, each page with the newest behind them
             pinned u2 u3 u4

So the cost of reading is linear in the history, whatever its length.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from condensegrpo.core.messages import History
from condensegrpo.rollout.render import Located

LEAST = 16  # tokens of older units on a page, however long the pinned messages and the newest unit are


class Piece(NamedTuple):
    """The tokens of a unit, with the template's before each of its messages."""

    ids: tuple[int, ...]
    said: tuple[int, ...]  # places in ids of what its messages say
    reply: tuple[int, ...]  # those of its reply

    def cut(self, room: int) -> "Piece":
        """Its beginning."""
        if len(self.ids) <= room:
            return self
        return Piece(
            self.ids[:room],
            tuple(place for place in self.said if place < room),
            tuple(place for place in self.reply if place < room),
        )


class Page(NamedTuple):
    """A prompt to be read, and where in it units stand."""

    ids: tuple[int, ...]
    numbers: tuple[int, ...]  # of units in the history; the newest is on every page and not among them
    places: tuple[tuple[int, ...], ...]  # in ids, one tuple a number
    last_output: tuple[int, ...]  # places of the newest unit's reply


class Pieces(NamedTuple):
    """A history's prompt in pieces: behind each other they are the prompt."""

    pinned: tuple[int, ...]
    units: tuple[Piece, ...]
    end: tuple[int, ...]  # what the template puts behind the last message


def pieces(history: History, located: Located) -> Pieces:
    """The prompt of all messages of a history, cut where a message ends: what introduces a message goes with it."""
    after = last = max((place.stop for place in located.places[: len(history.pinned)]), default=0)
    message = len(history.pinned)
    units = []
    for unit in history.units:
        own = located.places[message : message + len(unit.messages)]
        end = max(last, *(place.stop for place in own))
        units.append(
            Piece(
                located.ids[last:end],
                tuple(place - last for said in own for place in said),
                tuple(place - last for place in own[0]),
            )
        )
        last, message = end, message + len(own)
    return Pieces(located.ids[:after], tuple(units), located.ids[last:])


def pages(cut: Pieces, room: int) -> Iterator[Page]:
    """The pages of a history with at least two units, of at most ``room`` tokens if the pinned messages
    and the newest unit leave some.

    The newest unit gets half of what the pinned messages leave, at most; an older one a page, at most.
    """
    left = room - len(cut.pinned) - len(cut.end)
    newest = cut.units[-1].cut(max(left // 2, LEAST))
    left = max(left - len(newest.ids), LEAST)
    older = [piece.cut(left) for piece in cut.units[:-1]]
    start = length = 0
    for number, piece in enumerate(older):
        if number > start and length + len(piece.ids) > left:
            yield _page(cut, older, range(start, number), newest)
            start, length = number, 0
        length += len(piece.ids)
    if older:
        yield _page(cut, older, range(start, len(older)), newest)


def _page(cut: Pieces, older: Sequence[Piece], numbers: range, newest: Piece) -> Page:
    ids, places = list(cut.pinned), []
    for number in numbers:
        places.append(tuple(len(ids) + place for place in older[number].said))
        ids += older[number].ids
    last_output = tuple(len(ids) + place for place in newest.reply)
    return Page((*ids, *newest.ids, *cut.end), tuple(numbers), tuple(places), last_output)
