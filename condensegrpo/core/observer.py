"""Progress of a long job: the loops report it, the command line shows it."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec

from condensegrpo.core.evaluation import Evaluation

P = ParamSpec("P")


class Observer:
    """Receives progress reports and must not change the run. These methods ignore them, as ranks but the first do."""

    def phase(self, title: str, total: int | None) -> None:
        """A wait begins; ``total`` is the number of ``advance`` calls to come, None if unknown."""

    def advance(self, note: str = "") -> None:
        """One part of the phase is done."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """An optimiser step of GRPO was taken."""

    def evaluated(self, step: int, evaluations: Sequence[Evaluation]) -> None:
        """The policy after ``step`` steps was evaluated."""

    def trajectories_failed(self, text: str, traceback: str) -> None:
        """Trajectories failed; ``text`` is one line, ``traceback`` is empty where nothing was raised."""

    def notice(self, text: str) -> None:
        """Something happened that a person should know."""

    def log_lines(self, text: str) -> None:
        """Lines for the log alone, such as the versions of packages."""


def _to_all(report: Callable[Concatenate[Observer, P], None]) -> Callable[Concatenate["Observers", P], None]:
    """A method that passes one kind of report on."""

    @wraps(report)
    def passed_on(self: "Observers", /, *arguments: P.args, **options: P.kwargs) -> None:
        for observer in self.observers:
            getattr(observer, report.__name__)(*arguments, **options)

    return passed_on


class Observers(Observer):
    """Passes every report on to several observers, in order."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    phase = _to_all(Observer.phase)
    advance = _to_all(Observer.advance)
    step = _to_all(Observer.step)
    evaluated = _to_all(Observer.evaluated)
    trajectories_failed = _to_all(Observer.trajectories_failed)
    notice = _to_all(Observer.notice)
    log_lines = _to_all(Observer.log_lines)
