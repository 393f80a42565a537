"""Environments: the counterpart of the policy in one episode. Standard library only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, SupportsFloat

from condensegrpo.core.messages import History, Message, checked_messages
from condensegrpo.core.protocols.tool import EnvironmentTool
from condensegrpo.core.trajectory import MAX_REWARD, FinishReason

AT_MOST = f"of magnitude {MAX_REWARD:g} at most"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenHistory:
    """The history as the environment has it from now on, such as an agent that edits, drops or adds messages.

    The next prompt is rendered from it and declared as a condensation: it never continues the last one by ids.
    """

    history: History  # Unit.turn: the number of the reply among those that ``step`` was given, from 0; increasing
    by: str  # declared in place of the condenser
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to one reply. ``done`` with neither answer nor outcome is a format error."""

    observations: tuple[Message, ...] = ()
    done: bool = False
    answer: str | None = None
    outcome: float | None = None  # with ``done``: what the episode was worth to the environment, see reward environment
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    new_query: bool = False  # the observations ask a further question: limits per query count from here
    rewritten: RewrittenHistory | None = None  # None: the history goes on with the reply and the observations

    def __post_init__(self) -> None:
        """Check types and numbers, and make the numbers plain: anything else would fail later, in a file."""
        if not isinstance(self.rewritten, RewrittenHistory | None):
            raise TypeError(f"a Step has rewritten={self.rewritten!r:.80}, wanted a RewrittenHistory or None")
        if self.observations != ():
            object.__setattr__(self, "observations", checked_messages(self.observations, "step()"))
        if not isinstance(self.answer, str | None):
            raise TypeError(f"a Step has the answer {self.answer!r:.80}, wanted text or None")
        if self.outcome is not None:
            if not isinstance(self.outcome, SupportsFloat) or not abs(float(self.outcome)) <= MAX_REWARD:
                raise ValueError(
                    f"a Step has the outcome {self.outcome!r:.80}, wanted a finite number {AT_MOST}, or None"
                )
            object.__setattr__(self, "outcome", float(self.outcome))
        rewards = self.turn_rewards
        if not isinstance(rewards, Mapping) or not all(isinstance(value, SupportsFloat) for value in rewards.values()):
            raise TypeError(f'a Step has turn_rewards={rewards!r:.80}, wanted numbers by name, as in {{"hit": 1.0}}')
        if rewards:
            plain = {str(name): float(value) for name, value in rewards.items()}
            if not all(abs(value) <= MAX_REWARD for value in plain.values()):  # NaN included
                raise ValueError(f"a Step has the turn rewards {plain}, wanted finite numbers {AT_MOST}")
            object.__setattr__(self, "turn_rewards", plain)

    def checked(self) -> Self:
        """This step; ValueError if it has an answer or an outcome and does not end the episode: it would be lost."""
        if not self.done and (self.answer is not None or self.outcome is not None):
            end = f"the outcome {self.outcome}" if self.answer is None else f"the answer {self.answer!r:.80}"
            raise ValueError(f"a Step has {end} without done=True, and only the end of an episode has one")
        return self


class Environment:
    """One episode of one problem; used once. Replies that call tools go to the tools, all others come here.

    A method without ``async`` is called in a thread. In one with ``async``, code that blocks the event loop
    (``time.sleep``, a synchronous request) blocks every episode: put it into ``asyncio.to_thread``.
    """

    async def step(self, reply: Message) -> Step:
        """What follows from a reply that called no tool."""
        raise NotImplementedError

    async def start(self) -> tuple[Message, ...]:
        """The pinned messages of the history: system message and question; by default the question of the problem."""
        return ()

    @property
    def stop_strings(self) -> Sequence[str] | None:
        """Only of an environment that answers tool calls itself: what ends the next reply, beside the tool format's.

        ``step`` is then given every reply, with the calls that could be read in ``tool_calls``. Observations of role
        ``tool`` name the call in ``tool_call_id``; they are shown, shortened and counted like results of tools.
        """
        return None

    def tools(self) -> Sequence[EnvironmentTool]:
        """Tools of the episode, which may keep a state, by names that no tool of the run has.

        They are read after ``start`` and with a rewritten history.
        """
        return ()

    def read_history(self, history: History) -> None:
        """The history before the reply that ``step`` is given next, with the replies whose calls tools answered.

        Condensers leave its units as they were.
        """

    def read_finish(self, finish: FinishReason) -> None:
        """Why the reply ended that ``step`` is given next. By default one that was cut off ends the episode instead."""

    def count_with(self, count: Callable[[Sequence[Message], Sequence[EnvironmentTool]], int]) -> None:
        """Take up, before ``start``, how the tokens of a prompt of messages are counted that shows such tools."""

    async def close(self) -> None:
        """Free what it holds: a process, a file, a connection. Called once, however the episode ended: after ``start``
        raised and when it was cancelled too.
        """
