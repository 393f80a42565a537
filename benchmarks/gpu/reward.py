"""A reward that needs no skill."""

import random

from condensegrpo.core.trajectory import Trajectory


class Lottery:
    """A random number, drawn from the trajectory's name: nearly every group has a learning signal."""

    def __call__(self, trajectory: Trajectory, problem: object) -> dict[str, float]:
        """One number in [0, 1)."""
        return {"luck": random.Random(trajectory.id).random()}
