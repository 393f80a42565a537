"""The trajectories of one step: sampled, scored, and sorted into those that train and those that do not.

``roll_out`` talks to no other rank, so that it may run beside the learner (``ahead.py``); ``completed`` does, and runs
in the thread of the loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from condensegrpo.algorithms.credit import idle_groups, scores_of, split_masked
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.protocols import Problem
from condensegrpo.core.trajectory import ScoredTrajectory
from condensegrpo.learner import ranks
from condensegrpo.rollout.collect import collect, failures_of, tell_failures
from condensegrpo.rollout.group import named
from condensegrpo.storage.run_folder import write_trajectory
from condensegrpo.training.data_order import indices, spare_indices
from condensegrpo.training.rig import Rig


@dataclass(frozen=True, slots=True)
class Sampled:
    """What became of this rank's trajectories of a step."""

    kept: tuple[ScoredTrajectory, ...]  # they train; denominators count them
    masked: tuple[ScoredTrajectory, ...]  # by their stop, see algorithm.on_stop
    dropped: tuple[ScoredTrajectory, ...]  # by dynamic sampling: no trajectory of their group has an advantage

    def __add__(self, other: Self) -> Self:
        """Both together."""
        return type(self)(self.kept + other.kept, self.masked + other.masked, self.dropped + other.dropped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Problems that are rolled out together for a step."""

    step: int
    chosen: tuple[int, ...]  # indices of the step's problems so far
    new: int  # so many of them, the last ones, are this round's


def first_round(rig: Rig, step: int) -> Round:
    """The problems that are a step's own: a function of seed and step, and of nothing that happened."""
    count = rig.config.train.problems_per_step
    chosen = indices(seed=rig.config.seed, step=step - 1, count=count, size=len(rig.problems))
    return Round(step=step, chosen=chosen, new=count)


async def roll_out(rig: Rig, one: Round, seen: Callable[[], None]) -> tuple[ScoredTrajectory, ...]:
    """This rank's share of a round, whole groups; each trajectory is written as it finishes, and ``seen`` is called."""
    path = rig.folder.trajectories(one.step)

    def finished(scored: ScoredTrajectory) -> None:
        write_trajectory(path, scored)
        seen()

    return await collect(
        _share(rig, one),
        samples=rig.config.train.samples_per_problem,
        environment=rig.components.task.environment,
        engine=rig.engine,
        reward=rig.components.reward,
        run_seed=rig.config.seed,
        step=one.step,
        on_scored=finished,
    )


def trajectories_in(rig: Rig, one: Round) -> int:
    """How many trajectories this rank's share of a round has."""
    return len(_share(rig, one)) * rig.config.train.samples_per_problem


def completed(
    rig: Rig,
    first: Round,
    scored: Sequence[ScoredTrajectory],
    more: Callable[[Round], Sequence[ScoredTrajectory]],
) -> Sampled:
    """The trajectories of a step, sorted, with those that are sampled besides; every rank must call it.

    With ``algorithm.resample_rounds`` groups that teach nothing are dropped and as many new problems are sampled, round
    after round while groups are missing. DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476, sec. 3.2), with a
    limit. What is still missing then is missing from the step.

    Args:
        scored: of the first round.
        more: rolls a further round out.

    Raises:
        RolloutError: every trajectory of every round and rank failed.
    """
    config, chosen = rig.config, first.chosen
    sampled = _sorted(rig, scored)
    missing = _missing(sampled, len(chosen))
    for number in range(config.algorithm.resample_rounds):
        if not missing:
            break
        spare = spare_indices(
            seed=config.seed, step=first.step - 1, number=number, count=missing, size=len(rig.problems), used=chosen
        )
        chosen += spare
        again = _sorted(rig, more(Round(step=first.step, chosen=chosen, new=len(spare))))
        missing = _missing(again, missing)
        sampled += again
    everything = (*sampled.kept, *sampled.masked, *sampled.dropped)  # a round may be one broken problem
    tell_failures(ranks.gather(failures_of(everything)), rig.observer.say)
    return sampled


def sampled_by(config: RunConfig) -> dict[str, Any]:
    """What of a configuration decides which trajectories a step has and how they are sorted, as JSON."""
    parts = {"rollout", "condenser", "reward", "sampler", "algorithm"}
    figures = {"problems_per_step", "samples_per_problem"}
    return config.model_dump(mode="json", include={**dict.fromkeys(parts, True), "train": figures})


def _share(rig: Rig, one: Round) -> dict[str, Problem]:
    batch = list(named([rig.problems[index] for index in one.chosen]).items())
    return dict(batch[len(batch) - one.new :][ranks.rank() :: ranks.world_size()])


def _missing(sampled: Sampled, wanted: int) -> int:
    """How many of the groups wanted over all ranks have nothing that trains."""
    (found,) = ranks.sum_over_ranks([len({one.trajectory.group_id for one in sampled.kept})])
    return wanted - int(found)


def _sorted(rig: Rig, scored: Sequence[ScoredTrajectory]) -> Sampled:
    algorithm = rig.config.algorithm
    kept, masked = split_masked(scored, algorithm.on_stop)
    if algorithm.resample_rounds == 0:
        return Sampled(kept, masked, ())
    scores = scores_of(kept, on_stop=algorithm.on_stop, stop_penalty=algorithm.stop_penalty)
    idle = idle_groups(kept, rig.components.estimator(scores))
    return Sampled(
        kept=tuple(one for one in kept if one.trajectory.group_id not in idle),
        masked=masked,
        dropped=tuple(one for one in kept if one.trajectory.group_id in idle),
    )
