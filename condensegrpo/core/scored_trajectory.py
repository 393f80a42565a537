"""A trajectory with its score and figures: what sampling and scoring hand to training, evaluation and storage."""

from dataclasses import dataclass
from typing import Self

from condensegrpo.core.figures import TrajectoryFigures, figures_of
from condensegrpo.core.trajectory import Score, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A trajectory, its score, and the record of its figures."""

    trajectory: Trajectory
    score: Score
    figures: TrajectoryFigures  # of both

    @classmethod
    def of(cls, trajectory: Trajectory, score: Score) -> Self:
        """A trajectory that was scored just now."""
        return cls(trajectory=trajectory, score=score, figures=figures_of(trajectory, score))
