"""The trajectories of one step: sampled, scored, and sorted into those that train and those that do not."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Self

from condensegrpo.collect import collect, failures_of, tell_failures
from condensegrpo.credit import idle_groups, scores_of, split_masked
from condensegrpo.data_order import indices, spare_indices
from condensegrpo.learner import ranks
from condensegrpo.rig import Rig
from condensegrpo.rollout.group import named
from condensegrpo.storage import write_trajectory
from condensegrpo.trajectory import ScoredTrajectory


class Sampled(NamedTuple):
    """What became of this rank's trajectories of a step."""

    kept: tuple[ScoredTrajectory, ...]  # they train; denominators count them
    masked: tuple[ScoredTrajectory, ...]  # by their stop, see algorithm.on_stop
    dropped: tuple[ScoredTrajectory, ...]  # by dynamic sampling: no trajectory of their group has an advantage

    def __add__(self, other: "Sampled") -> Self:  # type: ignore[override]  # joined field by field, not as tuples
        """Both together."""
        return type(self)(self.kept + other.kept, self.masked + other.masked, self.dropped + other.dropped)


def sample_step(rig: Rig, step: int) -> Sampled:
    """Roll out the problems of a step, whole groups on each rank; each trajectory is written as it finishes.

    With ``algorithm.resample_rounds`` groups that teach nothing are dropped and as many new problems are sampled, round
    after round while groups are missing. DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476, sec. 3.2), with a
    limit. What is still missing then is missing from the step.

    Raises:
        RolloutError: every trajectory of every round and rank failed.
    """
    config = rig.config
    chosen = indices(seed=config.seed, step=step - 1, count=config.train.problems_per_step, size=len(rig.problems))
    sampled = _sample(rig, step, chosen, new=len(chosen))
    missing = _missing(sampled, len(chosen))
    for number in range(config.algorithm.resample_rounds):
        if not missing:
            break
        more = spare_indices(
            seed=config.seed, step=step - 1, number=number, count=missing, size=len(rig.problems), used=chosen
        )
        chosen += more
        again = _sample(rig, step, chosen, new=len(more))
        missing = _missing(again, missing)
        sampled += again
    everything = (*sampled.kept, *sampled.masked, *sampled.dropped)  # a round may be one broken problem
    tell_failures(ranks.gather(failures_of(everything)), rig.observer.say)
    return sampled


def _missing(sampled: Sampled, wanted: int) -> int:
    """How many of the groups wanted over all ranks have nothing that trains."""
    (found,) = ranks.sum_over_ranks([len({one.trajectory.group_id for one in sampled.kept})])
    return wanted - int(found)


def _sample(rig: Rig, step: int, chosen: Sequence[int], *, new: int) -> Sampled:
    """This rank's share of the last ``new`` of the problems chosen for a step, rolled out and sorted."""
    scored = _roll_out(rig, step, chosen, new=new)
    algorithm = rig.config.algorithm
    kept, masked = split_masked(scored, algorithm.on_stop)
    if algorithm.resample_rounds == 0:
        return Sampled(kept, masked, ())
    scores = scores_of(kept, on_stop=algorithm.on_stop, stop_penalty=algorithm.stop_penalty)
    idle = idle_groups(kept, rig.cast.estimator(scores))
    return Sampled(
        kept=tuple(one for one in kept if one.trajectory.group_id not in idle),
        masked=masked,
        dropped=tuple(one for one in kept if one.trajectory.group_id in idle),
    )


def _roll_out(rig: Rig, step: int, chosen: Sequence[int], *, new: int) -> tuple[ScoredTrajectory, ...]:
    plan = rig.config.train
    batch = named([rig.problems[index] for index in chosen])
    mine = dict(list(batch.items())[len(batch) - new :][ranks.rank() :: ranks.world_size()])
    path = rig.folder.trajectories(step)
    rig.observer.phase(f"step {step}: sampling", len(mine) * plan.samples_per_problem)

    def finished(one: ScoredTrajectory) -> None:
        write_trajectory(path, one)
        rig.observer.advance()

    return asyncio.run(
        collect(
            mine,
            samples=plan.samples_per_problem,
            environment=rig.cast.task.environment,
            engine=rig.engine,
            reward=rig.cast.reward,
            run_seed=rig.config.seed,
            step=step,
            on_scored=finished,
        )
    )
