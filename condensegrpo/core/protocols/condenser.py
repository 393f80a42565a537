"""Condensers: how a history is rewritten into a shorter one, and what the engine gives them. Standard library only."""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, eq, itemgetter
from typing import Protocol, runtime_checkable

from condensegrpo.core.messages import Caption, History, Message, Summary, Unit
from condensegrpo.core.protocols.pictures import MediaStore
from condensegrpo.core.trajectory import FinishReason, Span, SpanStatus

Count = Callable[[Sequence[Message]], int]  # tokens of these messages as a whole prompt, template and tools included


class UnitScorer(Protocol):
    """Says how much the next turn needs each unit of a history."""

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        """A number for every unit of each history: finite, not negative, the more the more the unit is needed.

        ``tokens`` is the longest prompt that may be read at once.
        """


@runtime_checkable
class RanksUnits(Protocol):
    """A condenser that ranks units by scores: it finds its scorers in ``Budget.scorers``."""

    @property
    def scorers(self) -> Sequence[str]:
        """Their names: ``policy``, ``leave_one_out``, or the folder or Hub id of a frozen model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A text that a condenser asks the policy for."""

    units: tuple[Unit, ...]  # at least one, to show after the pinned messages
    instruction: str  # shown after the last of them, see Unit.with_instruction
    max_tokens: int | None = None  # of the text; None: as many as of a reply


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSummary:
    """What the policy wrote."""

    text: str  # special tokens in it are text
    finish: FinishReason  # a text that was cut off by length is no summary


class TextWriter(Protocol):
    """Another model than the policy that answers a text, such as a request for a summary."""

    def check(self) -> None:
        """Raise ``ValueError`` if it cannot write."""

    async def write(self, text: str) -> WrittenSummary:
        """Its reply; SummaryRefused or SamplerError if there is none."""


WriteSummary = Callable[[Request], Awaitable[WrittenSummary]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a condensed prompt may cost, and how to tell."""

    tokens: int  # at most, of the whole prompt by ``count``
    count: Count
    scorers: Mapping[str, UnitScorer] = field(default_factory=dict)  # by name, those of ``RanksUnits``
    write: WriteSummary | None = None  # samples a condense turn; None: the condenser is none of ``WritesSummaries``
    request_tokens: int | None = None  # at most, of the prompt of a request; None: as ``tokens``
    reply_tokens: int | None = None  # at most, of a text that is written; None: as many as the request allows
    seconds: float | None = None  # after which the engine gives the condenser up; None: never
    media: MediaStore | None = None  # with the bytes of the history's pictures; None: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Condensed:
    """A condenser's answer: the units to show after the pinned messages, in order."""

    units: tuple[Unit, ...]
    reason: str = ""
    summary: Summary | None = None  # a new one, whose unit is among ``units``: from now on it is the history's
    captions: tuple[Caption, ...] = ()  # new ones: from now on they are the history's
    rejected: tuple[str, ...] = ()  # why texts that the policy wrote were not used; the last one written may have been


class Condenser(Protocol):
    """Rewrites a history into a shorter one: *how* to condense. Pinned messages stay, units are atomic."""

    async def condense(self, history: History, budget: Budget, tools: Sequence[Mapping[str, object]]) -> Condensed:
        """The units to show before the next turn, within ``budget``; the newest alone if even that does not fit."""


@runtime_checkable
class WritesSummaries(Protocol):
    """A condenser that asks the policy for text: only such a one gets ``Budget.write``."""

    @property
    def writes(self) -> int:
        """How often it may ask in one call of ``condense``, texts that it rejects included; 0: never."""


@runtime_checkable
class ChecksRoom(Protocol):
    """A condenser that needs some room, and can tell at the start of a run."""

    def check_room(self, pinned: Sequence[Message], budget: Budget) -> None:
        """Raise ``ValueError``, with what is needed, if it can never work after these pinned messages."""


@runtime_checkable
class Counted(Protocol):
    """A condenser that has something to count, such as calls of another model."""

    def counts(self) -> Mapping[str, float]:
        """What was counted since the last call, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A condenser in a pipeline, with its trigger."""

    name: str
    condenser: Condenser
    over: float = 1.0  # share of the budget that a prompt must exceed; 0: always

    def __post_init__(self) -> None:
        if isinstance(self.over, bool) or not 0 <= self.over <= 1:
            raise ValueError(f"the trigger of the stage {self.name!r} is {self.over}: wanted a share from 0 to 1")


_turn = attrgetter("turn")


def unit_tokens(history: History, count: Count) -> tuple[int, ...]:
    """The tokens of every unit, see ``added_tokens``; those in ``History.tokens`` are not counted again."""
    known = history.tokens
    return (*known, *(added_tokens(history, unit, count) for unit in history.units[len(known) :]))


def added_tokens(history: History, unit: Unit, count: Count) -> int:
    """The tokens that a unit adds to the pinned messages alone, its share of the template included."""
    tokens = history.sizes.get(unit)
    if tokens is None:
        tokens = max(count((*history.pinned, *unit.messages)) - count(history.pinned), 0)
        history.sizes[unit] = tokens
    return tokens


def condensation_spans(history: History, shown: Sequence[Unit], count: Count) -> tuple[Span, ...]:
    """What became of every unit of a history, from the units that are shown in place of them.

    A unit is kept if it is shown unchanged, rewritten if another unit is shown in its place, and otherwise dropped. If
    the history's summary is shown, all units that it covers are rewritten.

        units 0 1 2 3, shown 0 and 3 with its result masked     kept 0, dropped 1-2, rewritten 3
        units 0 1 2 3, shown the summary of 0 1 2 and 3         rewritten 0-2, kept 3

    Args:
        shown: of the history, rewritten or not, in order; before them its summary, if any.
    """
    units, tokens, start, spans = history.units, unit_tokens(history, count), 0, list[Span]()
    for status, run in groupby(_runs(history, tuple(shown)), key=itemgetter(0)):
        *_, (_, end) = run
        first, last, total = units[start].turn, units[end - 1].turn, sum(tokens[start:end])
        spans.append(Span(first=first, last=last, units=end - start, status=status, tokens=total))
        start = end
    return tuple(spans)


def _runs(history: History, shown: tuple[Unit, ...]) -> Iterator[tuple[SpanStatus, int]]:
    """Statuses in order, each with the index after its last unit."""
    units, done = history.units, 0
    if history.summary is not None and shown[:1] == (history.summary.unit,):
        shown, done = shown[1:], bisect_left(units, history.summary.through + 1, key=_turn)
        yield SpanStatus.REWRITTEN, done
    for unit, index in zip(shown, unit_positions(units, shown, done), strict=True):
        if index > done:
            yield SpanStatus.DROPPED, index
        done = index + 1
        yield SpanStatus.KEPT if unit is units[index] or unit == units[index] else SpanStatus.REWRITTEN, done
    if done < len(units):
        yield SpanStatus.DROPPED, len(units)


def unit_positions(units: Sequence[Unit], shown: Sequence[Unit], first: int = 0) -> Sequence[int]:
    """The index of each shown unit among the units of a history from ``first`` on, found by its turn.

    Raises:
        ValueError: it shows a unit that the history does not have, or not in order, or twice.
    """
    newest = range(len(units) - len(shown), len(units))
    if newest.start >= first and all(map(eq, map(_turn, shown), map(_turn, units[newest.start :]))):
        return newest
    turns, result, end = list(map(_turn, units)), list[int](), first
    for turn in map(_turn, shown):
        end = bisect_left(turns, turn, lo=end)
        if turns[end : end + 1] != [turn]:
            raise ValueError(
                f"it shows the units of turns {[unit.turn for unit in shown]}, wanted units of the history, each at "
                f"most once and in order: {turns}"
            )
        result.append(end)
        end += 1
    return result
