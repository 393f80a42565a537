"""Which weights a batch is sampled under: a function of the step alone, so that timing does not change what is learned.

    staleness 0   sampler  1₀    2₁    3₂                 n_v: batch n under the weights after step v
                  learner     1     2     3
    staleness 1   sampler  1₀ 2₀ 3₁ 4₂ 5₃                 while the learner takes step n, batch n + 1 is sampled
                  learner     1  2  3  4
    staleness 2   sampler  1₀ 2₀ 3₀ 4₂ 5₂ 6₄ 7₄           the sampler gets weights after every second step
                  learner     1  2  3  4  5  6

A whole batch is sampled under one set of weights. Its *staleness* is the number of optimiser
steps between those weights and the ones that its own step starts from: batch n_v has n − 1 − v.
"""

from collections.abc import Iterable

from condensegrpo.core.errors import RunError
from condensegrpo.core.trajectory import Trajectory


def sampler_gets_weights(step: int, staleness: int) -> bool:
    """Whether the sampler gets the weights after this step: after every step, or every n for a staleness n > 1."""
    return step % max(staleness, 1) == 0


def last_prefetched(step: int, *, staleness: int, steps: int) -> int:
    """The last batch that may be sampled under the weights that a step starts from, within the bound and the run."""
    return min(step + staleness, steps)


def staleness_of(trajectory: Trajectory, step: int) -> int:
    """Optimiser steps between the oldest turn that the policy sampled and the weights that its step starts from."""
    return max((step - 1 - turn.policy_version for turn in trajectory.turns if not turn.frozen), default=0)


def check_staleness(trajectories: Iterable[Trajectory], *, step: int, staleness: int) -> None:
    """Check the trajectories of a step against the bound.

    Raises:
        RunError: a trajectory has a turn that is too old.
    """
    for trajectory in trajectories:
        age = staleness_of(trajectory, step)
        if age > staleness:
            raise RunError(
                f"checking the trajectories of step {step}: {trajectory.id} has a turn that was sampled {age} "
                f"optimiser steps ago, and rollout.staleness is {staleness}. The sampler did not load the weights "
                f"that were sent to it, or reports a wrong version."
            )
