"""The reward ``environment``: what the environment says that the episode was worth."""

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory


class EnvironmentOutcome:
    """The outcome with which the environment ended the episode, or ``missing`` where it did not.

    An episode without an outcome ran into a limit, failed, or was ended by an answer that nobody judged. It is correct
    if the outcome is at least 1, and well formed if there is one.
    """

    def __init__(self, *, missing: float = 0.0) -> None:
        self._missing = missing

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        outcome = trajectory.outcome
        total = self._missing if outcome is None else outcome
        return RewardResult(
            total=total,
            components={"environment": total},
            format_valid=outcome is not None,
            correct=float(outcome is not None and outcome >= 1),
        )
