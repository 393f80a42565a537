"""What is said in an episode: messages, units and the history they form. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model asked for. ``arguments`` stays the raw JSON that it wrote, valid or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. ``content`` of a sampled reply is its whole text, tool-call markup included."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()  # parsed from content, for whoever runs or shows them
    tool_call_id: str | None = None  # of a tool result: the call that it answers
    name: str | None = None  # of a tool result: the tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One assistant reply with everything that answered it: condensers keep, drop or rewrite whole units."""

    turn: int  # index of the turn that sampled the reply; stays with the unit when others are dropped
    reply: Message
    results: tuple[Message, ...] = ()  # tool results and environment observations, in order

    @property
    def messages(self) -> tuple[Message, ...]:
        """The reply followed by its results."""
        return (self.reply, *self.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """An episode so far: the head, which no condenser touches, and the units after it."""

    head: tuple[Message, ...]  # system message, question, examples
    units: tuple[Unit, ...] = ()

    def add(self, unit: Unit) -> Self:
        """This history with one more unit at its end."""
        return type(self)(head=self.head, units=(*self.units, unit))

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages in order."""
        return flatten(self.head, self.units)


def flatten(head: Sequence[Message], units: Sequence[Unit]) -> tuple[Message, ...]:
    """The messages of a head and some units, in order."""
    return (*head, *(message for unit in units for message in unit.messages))
