"""Progress of a long job: the loops report it, the command line shows it."""

from collections.abc import Mapping, Sequence

from condensegrpo.core.evaluation import Evaluation


class Observer:
    """Receives progress reports, which these methods ignore; must not change the run."""

    def phase(self, title: str, total: int | None) -> None:
        """A wait begins; ``total`` is the number of ``advance`` calls to come, None if unknown."""

    def advance(self, note: str = "") -> None:
        """One part of the phase is done."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """An optimiser step of GRPO was taken."""

    def evaluated(self, step: int, evaluations: Sequence[Evaluation]) -> None:
        """The policy after ``step`` steps was evaluated."""

    def failed(self, text: str, traceback: str) -> None:
        """Trajectories failed; ``text`` is one line, ``traceback`` is empty where nothing was raised."""

    def say(self, text: str) -> None:
        """Something happened that a person should know."""

    def record(self, text: str) -> None:
        """Lines for the log alone, such as the versions of packages."""


class Silent(Observer):
    """Shows nothing: for tests and for every rank but the first."""


class Observers(Observer):
    """Passes every report on to several observers, in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def phase(self, title: str, total: int | None) -> None:
        """A wait begins."""
        for observer in self._observers:
            observer.phase(title, total)

    def advance(self, note: str = "") -> None:
        """One part of the phase is done."""
        for observer in self._observers:
            observer.advance(note)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """An optimiser step was taken."""
        for observer in self._observers:
            observer.step(step, metrics)

    def evaluated(self, step: int, evaluations: Sequence[Evaluation]) -> None:
        """The policy was evaluated."""
        for observer in self._observers:
            observer.evaluated(step, evaluations)

    def failed(self, text: str, traceback: str) -> None:
        """Trajectories failed."""
        for observer in self._observers:
            observer.failed(text, traceback)

    def say(self, text: str) -> None:
        """Something happened."""
        for observer in self._observers:
            observer.say(text)

    def record(self, text: str) -> None:
        """Lines for the log alone."""
        for observer in self._observers:
            observer.record(text)
