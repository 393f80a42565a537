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


class Silent(Observer):
    """Shows nothing: for tests and for every rank but the first."""
