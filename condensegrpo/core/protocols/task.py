"""Tasks: problems, the environments that pose them, and how they should be done. Standard library only."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from condensegrpo.core.condenser import Request
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Environment

Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question with its ground truth."""

    id: str
    question: str
    answer: str | None = None  # ground truth
    data: Mapping[str, Any] = field(default_factory=dict)  # whatever the task's environment and rewards need

    def __post_init__(self) -> None:
        """Raise TypeError for what is no text, such as a number as the answer: it would fail in the middle of a run."""
        for name, value in (("id", self.id), ("question", self.question), ("answer", self.answer)):
            if not isinstance(value, str) and (name != "answer" or value is not None):
                raise TypeError(f"the {name} of the problem {self.id!r:.80} is {value!r:.80}, wanted a text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One turn as it should be done, for the warm start: a context and the reply to it."""

    context: tuple[Message, ...]
    reply: str  # without the stop token, which the renderer adds
    problem: Problem | None = None  # the training problem that it is a turn of; None: not known


class Task(Protocol):
    """Problems and the environments that pose them."""

    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, in a fixed order. The splits share no problem."""

    def environment(self, problem: Problem) -> Environment:
        """A fresh episode."""


class Expert(Protocol):
    """Writes the texts of one episode as they should be, in the order of the episode. Used once."""

    def reply(self, context: Sequence[Message]) -> str | None:
        """The reply to what the policy would be shown, without the stop token, which the renderer adds.

        ``None`` gives the problem up: none of its turns is shown.
        """

    def write(self, request: Request) -> str:
        """The text that a condenser asks for, likewise."""


@runtime_checkable
class HasExpert(Protocol):
    """A task that can play: the warm start shows its turns in the contexts of the run's condenser."""

    def expert(self, problem: Problem) -> Expert:
        """The expert of an episode of a training problem. Of one problem it always plays the same."""


@runtime_checkable
class HasCorpus(Protocol):
    """A task that knows its words."""

    def corpus(self) -> Iterable[str]:
        """Texts that hold every word of the task, what the policy writes included, to build a tokenizer from."""


@runtime_checkable
class LeavesOut(Protocol):
    """A task that leaves out what would be trained on and evaluated with."""

    @property
    def left_out(self) -> int:
        """Training problems that were left out because the evaluation data has them."""

    @property
    def alike(self) -> int:
        """Training problems that have a question of the evaluation data, but other columns."""


@runtime_checkable
class JudgesReplies(Protocol):
    """A task that says more of a sampled reply than whether it is its expert's word for word."""

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a sampled reply is right for this context; ``None``: it commits to nothing that can be judged.

        A context may end with the request of a condenser, see ``Unit.with_instruction``.
        """


@runtime_checkable
class Demonstrates(JudgesReplies, Protocol):
    """A task that can show how it is done in contexts that it makes itself, whatever the run's condenser shows."""

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Turns of training problems, without end, in an order fixed by ``seed``."""
