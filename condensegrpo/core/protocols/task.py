"""Tasks: problems, the environments that pose them, and how they should be done. Standard library only."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

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


class Expert(Protocol):
    """Writes the texts of one episode as they should be, in the order of the episode. Used once."""

    def reply(self, context: Sequence[Message]) -> str | None:
        """The reply to what the policy would be shown, without the stop token, which the renderer adds.

        ``None`` gives the problem up: none of its turns is shown.
        """

    def write(self, request: Request) -> str:
        """The text that a condenser asks for, likewise."""


class Task:
    """Problems and the environments that pose them."""

    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, in a fixed order. The splits share no problem."""
        raise NotImplementedError

    def environment(self, problem: Problem) -> Environment:
        """A fresh episode."""
        raise NotImplementedError

    def corpus(self) -> Iterable[str]:
        """Texts that hold every word of the task, what the policy writes included, to build a tokenizer from."""
        return ()

    def expert(self, problem: Problem) -> Expert:
        """The expert of an episode of a training problem, whose turns the warm start shows in the contexts of the run's
        condenser. Of one problem it always plays the same.
        """
        raise NotImplementedError

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Turns of training problems in contexts that the task makes, without end, in an order fixed by ``seed``.

        The warm start shows them where the task has no expert.
        """
        return iter(())

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a sampled reply is right for this context; ``None``: it commits to nothing that can be judged.

        By default it is where it is the expert's word for word. A context may end with the request of a condenser, see
        ``Unit.with_instruction``.
        """
        return None

    @property
    def left_out(self) -> int:
        """Training problems that were left out because the evaluation data has them."""
        return 0

    @property
    def alike(self) -> int:
        """Training problems that have a question of the evaluation data, but other columns."""
        return 0
