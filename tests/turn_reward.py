"""A turn reward in a file of its own, as a user would bring it."""

from collections.abc import Sequence

from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory


class Brief:
    """1 for a reply of at most five tokens."""

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> Sequence[float]:
        return [float(len(turn.output_ids) <= 5) for turn in trajectory.turns]
