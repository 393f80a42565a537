"""Condensers: how a history is rewritten into a shorter one, and what the engine gives them. Standard library only."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from condensegrpo.core.messages import Caption, History, Message, Summary, Unit
from condensegrpo.core.protocols.pictures import MediaStore
from condensegrpo.core.trajectory import Finish

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
class Written:
    """What the policy wrote."""

    text: str  # special tokens in it are text
    finish: Finish  # a text that was cut off by length is no summary


Write = Callable[[Request], Awaitable[Written]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a condensed prompt may cost, and how to tell."""

    tokens: int  # at most, of the whole prompt by ``count``
    count: Count
    scorers: Mapping[str, UnitScorer] = field(default_factory=dict)  # by name, those of ``RanksUnits``
    write: Write | None = None  # samples a condense turn; None: the condenser is none of ``Writes``
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
class Writes(Protocol):
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
