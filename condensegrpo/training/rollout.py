"""The trajectories of the steps: which problems a step has, how its batch is sampled, and what of it trains.

``BatchRollout.run`` communicates with no other rank, so that it can run beside the learner; ``complete`` does, and runs
in the thread of the loop. ``RolloutPrefetcher`` samples on an event loop in a thread of its own. The thread that
learns decides which batches are begun, waits for the batch that it needs, and alone communicates with other ranks. Each
batch is sampled under one set of weights: weights change only while nothing is being sampled. Of batches under the same
weights the next one begins when most of the trajectories of the last one are scored, so that the sampler does not wait
for its longest trajectory.

The weights that a batch is sampled under are a function of the step alone, so that timing does not change the result:

    staleness 0   sampler  1₀    2₁    3₂                 n_v: batch n under the weights after step v
                  learner     1     2     3
    staleness 1   sampler  1₀ 2₀ 3₁ 4₂ 5₃                 while the learner takes step n, batch n + 1 is sampled
                  learner     1  2  3  4
    staleness 2   sampler  1₀ 2₀ 3₀ 4₂ 5₂ 6₄ 7₄           the sampler gets weights after every second step
                  learner     1  2  3  4  5  6

The *staleness* of a batch is the number of optimiser steps between its weights and those that its own step starts from:
batch n_v has n − 1 − v.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Self

from condensegrpo.algorithms.advantages import Estimate
from condensegrpo.algorithms.credit import Scores, idle_groups, scores_of, split_masked
from condensegrpo.assembly.data_order import problem_indices, spare_indices
from condensegrpo.assembly.runtime import provenance
from condensegrpo.assembly.workers import GroupPlayer
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.background_loop import PLUGIN_SECONDS, BackgroundLoop, Watch
from condensegrpo.core.defaults import overrides
from condensegrpo.core.errors import PluginError, RunError, SamplerError
from condensegrpo.core.failures import plugin_code
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.sampler import NamedTensors, Sampler
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.group import ProblemGroup, problem_groups
from condensegrpo.learner import ranks
from condensegrpo.learner.weights import all_gathered
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import part_file, write_trajectories

Scored = tuple[ScoredTrajectory, ...]
UNFINISHED = 0.5  # share of a batch's trajectories that may be under way when the next batch begins


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRollout:
    """The batches of a run: which problems belong to a step, this rank's part of them, and what of it trains."""

    config: RunConfig
    problems: Sequence[Problem]  # to train on
    estimator: Callable[[Scores], Estimate]
    player: GroupPlayer
    folder: RunFolder
    source: str  # the folder or Hub id that GRPO starts from

    def first_round(self, step: int) -> Round:
        """The problems of a step: a function of seed and step alone."""
        count = self.config.train.problems_per_step  # over all ranks
        chosen = problem_indices(seed=self.config.seed, step=step - 1, count=count, size=len(self.problems))
        return Round(step=step, chosen=chosen, new=count)

    def extra_round(self, earlier: Round, *, number: int, count: int) -> Round:
        """``count`` further problems for a step, round ``number`` of dynamic sampling."""
        spare = spare_indices(
            seed=self.config.seed,
            step=earlier.step - 1,
            number=number,
            count=count,
            size=len(self.problems),
            used=earlier.chosen,
        )
        return Round(step=earlier.step, chosen=earlier.chosen + spare, new=count)

    def size(self, batch: Round) -> int:
        """The number of trajectories in this rank's groups of a round."""
        return len(self._groups(batch)) * self.config.train.samples_per_problem

    async def run(self, batch: Round, on_scored: Callable[[], None]) -> Scored:
        """Roll out this rank's groups of a round; each trajectory is reported when it finishes."""
        return await self.player.play(
            self._groups(batch),
            samples=self.config.train.samples_per_problem,
            run_seed=self.config.seed,
            step=batch.step,
            on_scored=lambda _: on_scored(),
        )

    def _groups(self, batch: Round) -> tuple[ProblemGroup, ...]:
        everything = problem_groups([self.problems[index] for index in batch.chosen], batch.step)
        return everything[len(everything) - batch.new :][ranks.rank() :: ranks.world_size()]

    def split(self, scored: Sequence[ScoredTrajectory]) -> StepBatch:
        """Some trajectories, whole groups, by what becomes of them."""
        algorithm = self.config.algorithm
        kept, masked = split_masked(scored, algorithm.stops)
        if algorithm.resample_rounds == 0:  # groups without an advantage stay and count
            return StepBatch(kept, masked, ())
        scores = scores_of(kept, algorithm.stops)
        with plugin_code("computing the advantages of a step", PluginError):
            estimate = self.estimator(scores)
        idle = idle_groups(kept, estimate.advantage_NK)
        return StepBatch(
            kept=tuple(member for member in kept if member.trajectory.group_id not in idle),
            masked=masked,
            dropped=tuple(member for member in kept if member.trajectory.group_id in idle),
        )

    def complete(
        self,
        scored: Sequence[ScoredTrajectory],
        first: Round,
        run_round: Callable[[Round], Sequence[ScoredTrajectory]],
    ) -> StepBatch:
        """The batch of a step, with what dynamic sampling adds; every rank must call it.

        With ``resample_rounds`` groups without an advantage are dropped and as many new problems are sampled, round
        after round while groups are missing: DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476, sec. 3.2), with
        a limit. Groups that are still missing then are missing from the step.

        Args:
            scored: the trajectories of the first round.
            run_round: rolls out a further round.
        """
        batch, current = self.split(scored), first
        missing = _missing(batch, len(first.chosen))
        for number in range(self.config.algorithm.resample_rounds):
            if not missing:
                break
            current = self.extra_round(current, number=number, count=missing)
            extra = self.split(run_round(current))
            missing = _missing(extra, missing)
            batch += extra
        return batch

    def write(self, step: int, batch: StepBatch) -> None:
        """Write this rank's trajectories of a step into a file of its own."""
        ordered = sorted(  # by the index of the problem in its step: 12 of the group 6/12
            batch.trajectories, key=lambda each: (int(each.figures.group_id.rpartition("/")[2]), each.figures.sample)
        )
        sampled_with = provenance(self.config, model=self.source, step=step)
        write_trajectories(part_file(self.folder.trajectories(step), ranks.rank()), ordered, sampled_with)


def _missing(batch: StepBatch, expected: int) -> int:
    """How many of the groups expected over all ranks have no trajectory that trains."""
    (present,) = ranks.sum_over_ranks([len({scored.trajectory.group_id for scored in batch.kept})])
    return expected - int(present)


class RolloutPrefetcher:
    """The batches of a run: sampled on demand, or as many steps ahead as ``rollout.staleness`` allows."""

    def __init__(
        self,
        rollout: BatchRollout,
        observer: Observer,
        *,
        batches: Mapping[int, StepBatch],
        watch: Watch | None = None,
    ) -> None:
        """Start the thread.

        Args:
            batches: complete batches of a checkpoint, by step.
            watch: of the loop that trajectories are sampled on.
        """
        self._rollout, self._observer = rollout, observer
        self._staleness = rollout.config.rollout.staleness
        self._complete_batches = dict(batches)
        self._running: dict[int, Future[Scored]] = {}
        self._turn = asyncio.Lock()  # of the batch that begins next: first come, first served
        self._loop = BackgroundLoop("rollout", close_seconds=PLUGIN_SECONDS, watch=watch)

    def __enter__(self) -> Self:
        """Return the prefetcher itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Cancel what is being sampled and end the thread."""
        self._loop.close()

    def take(self, step: int) -> StepBatch:
        """The batch of a step, which it writes; begins what may be sampled under the weights that the step starts from.

        Every rank must call it. What sampling raised is raised here.
        """
        on_demand = not self._begun(step)
        if on_demand:
            first = self._rollout.first_round(step)
            self._observer.phase(f"step {step}: sampling", self._rollout.size(first))
            self._begin(step, self._observer.advance)
        else:
            self._observer.phase(f"step {step}: waiting for trajectories", None)
        self._complete(step)
        if on_demand or sampler_gets_weights(step - 1, self._staleness):
            steps = self._rollout.config.train.steps
            for later in range(step + 1, last_prefetched(step, staleness=self._staleness, steps=steps) + 1):
                if not self._begun(later):
                    self._begin(later, lambda: None)
        batch = self._complete_batches.pop(step)
        self._rollout.write(step, batch)
        check_staleness((scored.trajectory for scored in batch.trajectories), step=step, staleness=self._staleness)
        return batch

    @property
    def idle(self) -> bool:
        """Whether nothing is being sampled."""
        return not self._running

    def finish(self) -> dict[int, StepBatch]:
        """Wait until nothing is being sampled; returns the batches that no step has taken. Every rank must call it."""
        if self._running:
            self._observer.phase("waiting for the trajectories of the next step", None)
        for step in sorted(self._running):
            self._complete(step)
        return dict(self._complete_batches)

    def update_sampler(self, sampler: Sampler, named_tensors: NamedTensors, version: int) -> float:
        """Give the sampler new weights once nothing is being sampled; they are staged before, if it can stage them.

        Every rank must call it. Returns the seconds that it waited for the sampler's requests.
        """
        doing = f"giving the sampler the weights after step {version}"
        with all_gathered(named_tensors) as tensors:
            update: Callable[[], None] = partial(sampler.update, tensors, version)
            with plugin_code(doing, SamplerError):
                if overrides(sampler, Sampler.stage):  # while the next batch is still being sampled
                    update = sampler.stage(tensors, version)
            staged = time.monotonic()
            self.finish()
            waited = time.monotonic() - staged
            with plugin_code(doing, SamplerError):
                update()
        return waited

    def _begun(self, step: int) -> bool:
        return step in self._running or step in self._complete_batches

    def _begin(self, step: int, on_scored: Callable[[], None]) -> None:
        self._running[step] = self._loop.submit(self._in_turn(self._rollout.first_round(step), on_scored))

    def _complete(self, step: int) -> None:
        def run_round(extra: Round) -> Scored:
            self._observer.phase(f"step {extra.step}: sampling more problems", self._rollout.size(extra))
            return self._loop.submit(self._in_turn(extra, self._observer.advance)).result()

        if step in self._running:
            scored, first = self._running.pop(step).result(), self._rollout.first_round(step)
            self._complete_batches[step] = self._rollout.complete(scored, first, run_round)

    async def _in_turn(self, batch: Round, on_scored: Callable[[], None]) -> Scored:
        """Roll out a batch when most of the one before it is scored."""
        await self._turn.acquire()
        unfinished, most = self._rollout.size(batch), UNFINISHED * self._rollout.size(batch)
        holds_turn = True

        def count() -> None:
            nonlocal unfinished, holds_turn
            unfinished -= 1
            if holds_turn and unfinished <= most:
                holds_turn = False
                self._turn.release()
            on_scored()

        try:
            return await self._rollout.run(batch, count)
        finally:
            if holds_turn:
                self._turn.release()


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
    """Raise RunError if a trajectory of a step has a turn that is older than the bound."""
    for trajectory in trajectories:
        age = staleness_of(trajectory, step)
        if age > staleness:
            raise RunError(
                f"checking the trajectories of step {step}: {trajectory.id} has a turn that was sampled {age} "
                f"optimiser steps ago, and rollout.staleness is {staleness}. The sampler did not load the weights "
                f"that were sent to it, or reports a wrong version."
            )
