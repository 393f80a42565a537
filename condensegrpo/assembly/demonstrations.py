"""The demonstrations of a task: what its code raises there is an error that names file and line."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from condensegrpo.core.errors import CondenseError, ConfigError
from condensegrpo.core.failures import failure_of, is_ctrl_c
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols import Demonstrates, Demonstration, HasCorpus, Task


@dataclass(frozen=True, slots=True)
class CheckedDemonstrations:
    """The demonstrations of a task. Every method raises ``ConfigError`` where the task fails."""

    task: Demonstrates

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Turns of training problems, without end."""
        with _named(self.task, "demonstrations"):
            for turn in self.task.demonstrations(seed):
                if not isinstance(turn, Demonstration):
                    raise TypeError(f"yielded {turn!r:.80}, wanted a Demonstration")
                yield turn
            raise ValueError("they ended, wanted turns without end, as of a loop that begins again")

    def sound(self, context: tuple[Message, ...], reply: str) -> bool | None:
        """Whether a sampled reply is right for this context."""
        with _named(self.task, "sound"):
            return self.task.sound(context, reply)


def demonstrating(task: Task, doing: str, why_not: str) -> CheckedDemonstrations:
    """The demonstrations of a task.

    Raises:
        ConfigError: it has none.
    """
    if isinstance(task, Demonstrates):
        return CheckedDemonstrations(task)
    raise ConfigError(f"{doing} with the task {type(task).__name__}: {why_not}.")


def corpus_of(task: Task) -> tuple[str, ...]:
    """Text that holds every word of a task.

    Raises:
        ConfigError: it has none, or fails.
    """
    if not isinstance(task, HasCorpus):
        raise ConfigError(
            f"making a new model with the task {type(task).__name__}: a tokenizer needs its corpus(). Set model.path "
            f"instead."
        )
    with _named(task, "corpus"):
        return tuple(task.corpus())


@contextmanager
def _named(task: object, method: str) -> Iterator[None]:
    try:
        yield
    except CondenseError:
        raise
    except BaseException as error:  # the boundary to a task
        if is_ctrl_c(error) or isinstance(error, GeneratorExit):
            raise
        called = getattr(task, method)
        failure = failure_of(f"calling {method} of the task {type(task).__name__}", error, plugin=called)
        raise ConfigError(f"{failure}.") from error
