"""The trajectories of one step: rolled out, scored, and split into those that train and those that do not.

``BatchRollout`` communicates with no other rank, so that it can run beside the learner (``prefetching.py``);
``complete_batch`` does, and runs in the thread of the loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from condensegrpo.algorithms.advantages import Estimate
from condensegrpo.algorithms.credit import Scores, idle_groups, scores_of, split_masked
from condensegrpo.algorithms.settings import StopSettings
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.players import GroupPlayer
from condensegrpo.assembly.runtime import provenance
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.data_order import indices, spare_indices
from condensegrpo.core.errors import PluginError
from condensegrpo.core.failures import plugin_code
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.episodes.group import ProblemGroup, problem_groups
from condensegrpo.learner import ranks
from condensegrpo.storage.background_writer import BackgroundWriter
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import write_trajectory


@dataclass(frozen=True, slots=True)
class StepBatch:
    """This rank's trajectories of a step, by what becomes of them."""

    kept: tuple[ScoredTrajectory, ...]  # they train; denominators count them
    masked: tuple[ScoredTrajectory, ...]  # by their stop reason
    dropped: tuple[ScoredTrajectory, ...]  # by dynamic sampling: no trajectory of their group has an advantage

    def __add__(self, other: Self) -> Self:
        """Both batches together."""
        return type(self)(self.kept + other.kept, self.masked + other.masked, self.dropped + other.dropped)

    @property
    def trajectories(self) -> tuple[ScoredTrajectory, ...]:
        """All trajectories of the batch."""
        return (*self.kept, *self.masked, *self.dropped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Problems that are rolled out together for a step."""

    step: int
    chosen: tuple[int, ...]  # indices of all problems of the step so far
    new: int  # the last ``new`` of them belong to this round


def trajectory_writer(config: RunConfig, folder: RunFolder, source: str) -> Callable[[int, ScoredTrajectory], None]:
    """Writes a trajectory of a step to the step's file; ``source`` is what GRPO starts from."""

    def write(step: int, scored: ScoredTrajectory) -> None:
        write_trajectory(folder.trajectories(step), scored, provenance(config, model=source, step=step))

    return write


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRollout:
    """Rolls out the training problems: which ones belong to a step, and this rank's part of them."""

    problems: Sequence[Problem]
    player: GroupPlayer
    seed: int
    problems_per_step: int  # over all ranks
    samples_per_problem: int
    write: Callable[[int, ScoredTrajectory], None]  # to the files of the run: a step and one of its trajectories

    def first_round(self, step: int) -> Round:
        """The problems of a step: a function of seed and step alone."""
        count = self.problems_per_step
        chosen = indices(seed=self.seed, step=step - 1, count=count, size=len(self.problems))
        return Round(step=step, chosen=chosen, new=count)

    def extra_round(self, earlier: Round, *, number: int, count: int) -> Round:
        """``count`` further problems for a step, round ``number`` of dynamic sampling."""
        spare = spare_indices(
            seed=self.seed,
            step=earlier.step - 1,
            number=number,
            count=count,
            size=len(self.problems),
            used=earlier.chosen,
        )
        return Round(step=earlier.step, chosen=earlier.chosen + spare, new=count)

    def size(self, batch: Round) -> int:
        """The number of trajectories in this rank's groups of a round."""
        return len(self._groups(batch)) * self.samples_per_problem

    async def run(self, batch: Round, on_scored: Callable[[], None]) -> tuple[ScoredTrajectory, ...]:
        """Roll out this rank's groups of a round; each trajectory is written, and reported, when it finishes."""

        def record(scored: ScoredTrajectory) -> None:
            writer.submit(partial(self.write, batch.step, scored))
            on_scored()

        with BackgroundWriter() as writer:
            return await self.player.play(
                self._groups(batch),
                samples=self.samples_per_problem,
                run_seed=self.seed,
                step=batch.step,
                on_scored=record,
            )

    def _groups(self, batch: Round) -> tuple[ProblemGroup, ...]:
        everything = problem_groups([self.problems[index] for index in batch.chosen], batch.step)
        return everything[len(everything) - batch.new :][ranks.rank() :: ranks.world_size()]


def batch_rollout(
    components: Components, player: GroupPlayer, write: Callable[[int, ScoredTrajectory], None]
) -> BatchRollout:
    """The rollout of a run's batches."""
    config = components.config
    return BatchRollout(
        problems=components.problems("train"),
        player=player,
        seed=config.seed,
        problems_per_step=config.train.problems_per_step,
        samples_per_problem=config.train.samples_per_problem,
        write=write,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFilter:
    """Decides which trajectories of a step train."""

    stops: StopSettings
    estimator: Callable[[Scores], Estimate]
    resample_rounds: int  # of dynamic sampling; 0: groups without an advantage stay and count

    def split(self, scored: Sequence[ScoredTrajectory]) -> StepBatch:
        """The batch of some trajectories, whole groups."""
        kept, masked = split_masked(scored, self.stops)
        if self.resample_rounds == 0:
            return StepBatch(kept, masked, ())
        scores = scores_of(kept, self.stops)
        with plugin_code("computing the advantages of a step", PluginError):
            estimate = self.estimator(scores)
        idle = idle_groups(kept, estimate.advantage_NK)
        return StepBatch(
            kept=tuple(member for member in kept if member.trajectory.group_id not in idle),
            masked=masked,
            dropped=tuple(member for member in kept if member.trajectory.group_id in idle),
        )


def batch_filter(components: Components) -> BatchFilter:
    """Decides which trajectories of a run train."""
    algorithm = components.config.algorithm
    return BatchFilter(stops=algorithm.stops, estimator=components.estimator, resample_rounds=algorithm.resample_rounds)


def complete_batch(
    scored: Sequence[ScoredTrajectory],
    first: Round,
    *,
    rollout: BatchRollout,
    batch_filter: BatchFilter,
    run_round: Callable[[Round], Sequence[ScoredTrajectory]],
) -> StepBatch:
    """The batch of a step, with what dynamic sampling adds; every rank must call it.

    With ``resample_rounds`` groups without an advantage are dropped and as many new problems are sampled, round after
    round while groups are missing: DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476, sec. 3.2), with a limit.
    Groups that are still missing then are missing from the step.

    Args:
        scored: the trajectories of the first round.
        run_round: rolls out a further round.
    """
    batch, current = batch_filter.split(scored), first
    missing = _missing(batch, len(first.chosen))
    for number in range(batch_filter.resample_rounds):
        if not missing:
            break
        current = rollout.extra_round(current, number=number, count=missing)
        extra = batch_filter.split(run_round(current))
        missing = _missing(extra, missing)
        batch += extra
    return batch


def _missing(batch: StepBatch, expected: int) -> int:
    """How many of the groups expected over all ranks have no trajectory that trains."""
    (present,) = ranks.sum_over_ranks([len({scored.trajectory.group_id for scored in batch.kept})])
    return expected - int(present)
