"""A reward that needs no skill."""

import random

from condensegrpo.core.trajectory import Trajectory


class Lottery:
    """Drawn by the trajectory's name: about no group is without a signal."""

    def __call__(self, trajectory: Trajectory, problem: object) -> dict[str, float]:
        """One number in [0, 1)."""
        return {"luck": random.Random(trajectory.id).random()}
