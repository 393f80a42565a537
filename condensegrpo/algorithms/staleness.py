"""Which batches are sampled under which weights: functions of the step, so that no clock decides what a run learns.

    staleness 0   sampler  1₀    2₁    3₂                 n_v: batch n under the weights after step v
                  learner     1     2     3
    staleness 1   sampler  1₀ 2₀ 3₁ 4₂ 5₃                 while the learner takes step n, batch n + 1 is sampled
                  learner     1  2  3  4
    staleness 2   sampler  1₀ 2₀ 3₀ 4₂ 5₂ 6₄ 7₄           weights go out after every second step
                  learner     1  2  3  4  5  6

A batch is sampled under one set of weights from its first token to its last. Its *staleness* is the number of optimiser
steps between those weights and the ones that its own step starts from: batch n_v has n − 1 − v.
"""

from collections.abc import Iterable

from condensegrpo.core.errors import RunError
from condensegrpo.core.trajectory import Trajectory


def weights_go(step: int, staleness: int) -> bool:
    """Whether the sampler gets the weights after a step: after every one, with a staleness of n > 1 every n steps."""
    return step % max(staleness, 1) == 0


def newest(step: int, *, staleness: int, steps: int) -> int:
    """The last batch that may be sampled under the weights that a step starts from: no older than allowed, if there."""
    return min(step + staleness, steps)


def staleness_of(trajectory: Trajectory, step: int) -> int:
    """Optimiser steps between the oldest turn of a trajectory and the weights that its step starts from."""
    return max((step - 1 - turn.policy_version for turn in trajectory.turns), default=0)


def check_staleness(trajectories: Iterable[Trajectory], *, step: int, staleness: int) -> None:
    """Check the trajectories of a step against the bound.

    Raises:
        RunError: one has a turn that is too old.
    """
    for one in trajectories:
        found = staleness_of(one, step)
        if found > staleness:
            raise RunError(
                f"taking the trajectories of step {step}: {one.id} has a turn that was sampled {found} optimiser steps "
                f"ago, and rollout.staleness is {staleness}. The sampler did not take the weights that it was given, "
                f"or reports another version."
            )
