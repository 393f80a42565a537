"""Splits a rendered history into pages that fit the model. Pure functions of token ids.

    history  pinned u0 u1 u2 u3 u4          u4 is the newest: its reply is the last output
    pages    pinned u0 u1 u4                as many units as fit, in order, each page followed by the newest
             pinned u2 u3 u4

So the cost of a pass over all pages is linear in the length of the history.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from condensegrpo.core.messages import History
from condensegrpo.episodes.render import Located

MIN_TOKENS = 16  # of older units on a page, however long the pinned messages and the newest unit are


class UnitTokens(NamedTuple):
    """The tokens of a unit, with the chat template's tokens before each of its messages."""

    ids: tuple[int, ...]
    content: tuple[int, ...]  # indices in ids of the content of its messages
    reply: tuple[int, ...]  # indices of its reply's content
    pictures: tuple[tuple[str, range], ...] = ()  # hashes, and indices in ids

    @property
    def media(self) -> tuple[str, ...]:
        """The hashes of its pictures."""
        return tuple(sha256 for sha256, _ in self.pictures)

    def truncated(self, room: int) -> "UnitTokens":
        """Its first ``room`` tokens; fewer where a picture would be cut."""
        if len(self.ids) <= room:
            return self
        room = min([span.start for _, span in self.pictures if span.stop > room], default=room)
        return UnitTokens(
            self.ids[:room],
            tuple(index for index in self.content if index < room),
            tuple(index for index in self.reply if index < room),
            tuple(shown for shown in self.pictures if shown[1].stop <= room),
        )


class Page(NamedTuple):
    """A prompt for one pass, with the tokens of its units."""

    ids: tuple[int, ...]
    numbers: tuple[int, ...]  # of units in the history; the newest is on every page and is not listed
    units: tuple[tuple[int, ...], ...]  # indices in ids of the units' contents, one tuple per number
    last_output: tuple[int, ...]  # indices in ids of the newest unit's reply
    media: tuple[str, ...]  # the hashes of its pictures, in order


class HistoryTokens(NamedTuple):
    """A history's prompt, split; the parts in order are the prompt."""

    pinned: tuple[int, ...]
    units: tuple[UnitTokens, ...]
    end: tuple[int, ...]  # tokens of the template after the last message
    pinned_media: tuple[str, ...] = ()  # the hashes of the pictures of the pinned messages


def split_history(history: History, located: Located) -> HistoryTokens:
    """The prompt of a history, split where a message ends: the template's introduction of a message belongs to it."""
    after = last = max((span.stop for span in located.spans[: len(history.pinned)]), default=0)
    message = len(history.pinned)
    pinned_media = tuple(part.sha256 for pinned in history.pinned for part in pinned.media)
    spans = iter(located.pictures[len(pinned_media) :])
    units = []
    for unit in history.units:
        contents = located.spans[message : message + len(unit.messages)]
        shown = [(part.sha256, next(spans)) for each in unit.messages for part in each.media]
        end = max(last, *(span.stop for span in contents))
        content = {index - last for span in (*contents, *(span for _, span in shown)) for index in span}
        units.append(
            UnitTokens(
                located.ids[last:end],
                tuple(sorted(content)),  # a template may show a picture before what it says of the message
                tuple(index - last for index in contents[0]),
                tuple((sha256, range(span.start - last, span.stop - last)) for sha256, span in shown),
            )
        )
        last, message = end, message + len(contents)
    return HistoryTokens(located.ids[:after], tuple(units), located.ids[last:], pinned_media)


def pages(tokens: HistoryTokens, room: int) -> Iterator[Page]:
    """The pages of a history with at least two units, of at most ``room`` tokens if the pinned messages
    and the newest unit leave some.

    The newest unit is truncated to half of what the pinned messages leave, an older unit to a page.
    """
    left = room - len(tokens.pinned) - len(tokens.end)
    newest = tokens.units[-1].truncated(max(left // 2, MIN_TOKENS))
    left = max(left - len(newest.ids), MIN_TOKENS)
    older = [unit.truncated(left) for unit in tokens.units[:-1]]
    start = length = 0
    for number, unit in enumerate(older):
        if number > start and length + len(unit.ids) > left:
            yield _page(tokens, older, range(start, number), newest)
            start, length = number, 0
        length += len(unit.ids)
    if older:
        yield _page(tokens, older, range(start, len(older)), newest)


def _page(tokens: HistoryTokens, older: Sequence[UnitTokens], numbers: range, newest: UnitTokens) -> Page:
    ids, units, media = list(tokens.pinned), [], [*tokens.pinned_media]
    for number in numbers:
        units.append(tuple(len(ids) + index for index in older[number].content))
        ids += older[number].ids
        media += older[number].media
    last_output = tuple(len(ids) + index for index in newest.reply)
    shown = (*media, *newest.media)
    return Page((*ids, *newest.ids, *tokens.end), tuple(numbers), tuple(units), last_output, shown)
