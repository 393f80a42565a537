"""Condensers: how a history is rewritten into a shorter one, and what the engine gives them. Standard library only."""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter, eq, itemgetter
from typing import Protocol

from condensegrpo.core.messages import Caption, History, Message, Unit
from condensegrpo.core.protocols.pictures import MediaStore
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.trajectory import FinishReason, Span, SpanStatus

Count = Callable[[Sequence[Message]], int]  # tokens of these messages as a whole prompt, template and tools included


class UnitScorer(Protocol):
    """Says how much the next turn needs each unit of a history."""

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        """A number for every unit of each history: finite, not negative, the more the more the unit is needed.

        ``tokens`` is the longest prompt that may be read at once.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A text that a condenser asks the policy for."""

    units: tuple[Unit, ...]  # at least one, to show after the pinned messages
    instruction: str  # shown after the last of them, see Unit.with_instruction
    max_tokens: int | None = None  # of the text; None: as many as of a reply


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSummary:
    """A text that the policy, or another model, wrote for a condenser."""

    text: str  # special tokens in it are text
    finish: FinishReason  # a text that was cut off by length is no summary
    tokens: int | None = None  # of the text; None: not known, such as those of another model


class TextWriter(Protocol):
    """Another model than the policy that answers a text, such as a request for a summary."""

    def check(self) -> None:
        """Raise ``ValueError`` if it cannot write."""

    async def write(self, text: str) -> WrittenSummary:
        """Its reply; SummaryRefused or SamplerError if there is none."""


WriteSummary = Callable[[Request], Awaitable[WrittenSummary]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The tokens that a condensed prompt may have, and the means of a condenser."""

    tokens: int  # of all units together: what system message and question leave
    prompt_tokens: int  # of the largest whole prompt; scorers read at most as much, ``check`` gets the largest request
    scorers: Mapping[str, UnitScorer] = field(default_factory=dict)  # by name, those of ``Condenser.scorers``
    # samples a condense turn; raises ``SummaryRefused`` for a request that does not fit. None: ``Condenser.writes`` is
    # 0, the history has no unit, or this is a repeated call
    write: WriteSummary | None = None
    reply_tokens: int | None = None  # at most, of a text that is written; None: as many as the request allows
    seconds: float | None = None  # after which the engine gives the condenser up; None: never
    media: MediaStore | None = None  # with the bytes of the history's pictures; None: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Condensed:
    """A condenser's answer: the units to show after the pinned messages, in order."""

    units: tuple[Unit, ...]
    reason: str = ""
    note: Unit | None = None  # new, and among ``units``: later calls get it as ``History.note``; see ``messages.note``
    captions: tuple[Caption, ...] = ()  # new: later calls get them in ``History.captions``
    rejected: tuple[str, ...] = ()  # why texts that the policy wrote were not used; the last one written may have been

    def check(self, units: tuple[Unit, ...]) -> None:
        """Raise ``TypeError`` or ``ValueError`` if it does not show units of a history, and a note that it makes."""
        check_shown(units, self.units)
        note = self.note
        if note is not None and note not in self.units:
            raise ValueError(f"its note on the turns up to {note.turn} is not among its units")
        if note is not None and note.turn >= units[-1].turn:
            raise ValueError(f"its note covers all units, wanted the newest unit, of turn {units[-1].turn}, to stay")


class Condenser:
    """Rewrites a history into a shorter one: *how* to condense. Pinned messages stay, units are atomic.

    One serves all episodes at once and keeps nothing between calls. The tokens of units add up; of units that it
    rewrites they are estimated. If what it returns turns out to be over budget as a prompt, it is called again with the
    overflow taken off ``budget.tokens``, at most three times.

        class Newest(Condenser):
            async def condense(self, history, budget):
                units = list(history.units)
                while len(units) > 1 and sum(unit.tokens for unit in units) > budget.tokens:
                    del units[0]
                return Condensed(units=tuple(units))
    """

    @property
    def writes(self) -> int:
        """How often ``condense`` may ask the policy for a text in one call, rejected ones included."""
        return 0

    @property
    def scorers(self) -> Sequence[str]:
        """The names of the scorers that it uses: policy, leave_one_out, or the folder or Hub id of a model."""
        return ()

    async def condense(self, history: History, budget: Budget) -> Condensed:
        """The units to show before the next turn, within ``budget``; the newest alone if even that does not fit."""
        raise NotImplementedError

    def tools(self) -> Sequence[EnvironmentTool]:
        """Tools by which the policy decides what is shown, offered in every episode of a run. They keep nothing.

        They accept a call, or refuse it by an answer that starts with ``Error:``; ``condense`` reads the accepted calls
        from ``history.raw_units``.
        """
        return ()

    def check(self, pinned: Sequence[Message], budget: Budget, count: Count) -> None:
        """Raise ``ValueError``, with what is needed, if it can never work after these messages; called once a run."""

    def counts(self) -> Mapping[str, float]:
        """Its counts since the last call, by name, such as calls of another model."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A condenser in a pipeline, with its trigger."""

    name: str
    condenser: Condenser
    over: float = 1.0  # share of the budget that the units must exceed; 0: always

    def __post_init__(self) -> None:
        if isinstance(self.over, bool) or not 0 <= self.over <= 1:
            raise ValueError(f"the trigger of the stage {self.name!r} is {self.over}: wanted a share from 0 to 1")


_turn = attrgetter("turn")
_tokens = attrgetter("tokens")


def with_tokens(history: History, count: Count) -> History:
    """A history whose units have their tokens, those of pictures too: those of units that have none are counted."""
    pinned = count(history.pinned)

    def tokens(messages: Sequence[Message]) -> int:
        return max(count((*history.pinned, *messages)) - pinned, 1)

    def counted(unit: Unit) -> Unit:
        total, media = unit.tokens or tokens(unit.messages), unit.media_tokens
        if not media and any(message.media for message in unit.results):
            media = total - tokens([replace(message, content=message.text_without_media) for message in unit.messages])
        known = (total, media) == (unit.tokens, unit.media_tokens)
        return unit if known else replace(unit, tokens=total, media_tokens=media)

    return replace(history, units=tuple(map(counted, history.units)))


def condensation_spans(history: History, shown: Sequence[Unit]) -> tuple[Span, ...]:
    """The status of every unit of a history, from the units that are shown in place of them.

    A unit is kept if it is shown unchanged, rewritten if another unit is shown in its place, and otherwise dropped. If
    the history's note is shown, all units that it covers are rewritten.

        units 0 1 2 3, shown 0 and 3 with its result masked     kept 0, dropped 1-2, rewritten 3
        units 0 1 2 3, shown a note of 0 1 2 and 3              rewritten 0-2, kept 3

    Args:
        shown: of the history, rewritten or not, in order; before them its note, if any.
    """
    units, start, spans = history.units, 0, list[Span]()
    for status, run in groupby(_runs(history, tuple(shown)), key=itemgetter(0)):
        end = max(index for _, index in run)
        alike = units[start:end]
        total = sum(map(_tokens, alike))
        spans.append(Span(first=alike[0].turn, last=alike[-1].turn, units=len(alike), status=status, tokens=total))
        start = end
    return tuple(spans)


def _runs(history: History, shown: tuple[Unit, ...]) -> Iterator[tuple[SpanStatus, int]]:
    """Statuses in order, each with the index after its last unit."""
    units, done = history.units, 0
    if history.note is not None and shown[:1] == (history.note,):
        shown, done = shown[1:], bisect_left(units, history.note.turn + 1, key=_turn)
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


def check_shown(units: tuple[Unit, ...], shown: tuple[Unit, ...]) -> None:
    """Check that the shown units are of the history, each at most once and in order, rewritten or not."""
    if shown == units[len(units) - len(shown) :]:
        return
    if wrong := [unit for unit in shown if not isinstance(unit, Unit)]:
        raise TypeError(f"condense() returned {wrong[0]!r:.80} among its units, wanted those of history.units")
    for unit, index in zip(shown, unit_positions(units, shown), strict=True):
        if unit is not units[index]:
            _check_whole(unit, units[index])


def _check_whole(shown: Unit, raw: Unit) -> None:
    """Check that a shown unit is a reply with its results: no tool result without its call.

    A malformed call has a result too, but is in the text of its reply only.
    """
    if shown.reply.role != "assistant":
        raise ValueError(f"it shows the unit of turn {shown.turn} with a reply of role {shown.reply.role!r}")
    answers = [message.tool_call_id for message in shown.results if message.tool_call_id is not None]
    if not answers:
        return
    made = {call.id for call in shown.reply.tool_calls}
    if shown.reply == raw.reply:
        made |= {message.tool_call_id for message in raw.results if message.tool_call_id is not None}
    orphans = [call for call in answers if call not in made]
    if orphans:
        raise ValueError(
            f"it shows the unit of turn {shown.turn} with results of the calls {orphans}, which its reply does not make"
        )
