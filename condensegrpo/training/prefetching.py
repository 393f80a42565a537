"""Sampling beside the learner: batches are rolled out on an event loop in a thread of its own.

The thread that learns decides which batches are begun (``algorithms/staleness.py``), waits for what it needs, and alone
communicates with other ranks. Each batch is sampled under one set of weights: weights change only while nothing is
being sampled. Of batches under the same weights the next one begins when most of the trajectories of the last one are
scored, so that the sampler does not wait for its longest trajectory.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Self

from condensegrpo.algorithms.staleness import check_staleness, last_prefetched, sampler_gets_weights
from condensegrpo.core.background_loop import PLUGIN_SECONDS, BackgroundLoop, RunsCoroutines
from condensegrpo.core.errors import SamplerError
from condensegrpo.core.failures import plugin_code
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.sampler import NamedTensors, Sampler, StagesWeights
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.learner.weights import all_gathered
from condensegrpo.training.rollout_step import BatchFilter, BatchRollout, Round, StepBatch, complete_batch

Scored = tuple[ScoredTrajectory, ...]
UNFINISHED = 0.5  # share of a batch's trajectories that may be under way when the next batch begins


class RolloutPrefetcher:
    """The batches of a run: sampled on demand, or as many steps ahead as ``rollout.staleness`` allows."""

    def __init__(
        self,
        rollout: BatchRollout,
        batch_filter: BatchFilter,
        *,
        staleness: int,
        steps: int,
        observer: Observer,
        batches: Mapping[int, StepBatch],
        loop: RunsCoroutines | None = None,
    ) -> None:
        """Start the thread.

        Args:
            steps: the last step of the run.
            batches: complete batches of a checkpoint, by step.
            loop: that the batches are sampled on; None: one in a thread of its own.
        """
        self._rollout = rollout
        self._filter = batch_filter
        self._staleness, self._steps = staleness, steps
        self._observer = observer
        self._complete_batches = dict(batches)
        self._running: dict[int, Future[Scored]] = {}
        self._turn = asyncio.Lock()  # of the batch that begins next: first come, first served
        self._loop = loop or BackgroundLoop("rollout", close_seconds=PLUGIN_SECONDS)

    def __enter__(self) -> Self:
        """Return the prefetcher itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Cancel what is being sampled and end the thread."""
        self._loop.close()

    def take(self, step: int) -> StepBatch:
        """The batch of a step; begins what may be sampled under the weights that the step starts from.

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
            for later in range(step + 1, last_prefetched(step, staleness=self._staleness, steps=self._steps) + 1):
                if not self._begun(later):
                    self._begin(later, lambda: None)
        batch = self._complete_batches.pop(step)
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

    def update_sampler(
        self, sampler: Sampler, named_tensors: NamedTensors, version: int, *, clock: Callable[[], float]
    ) -> float:
        """Give the sampler new weights once nothing is being sampled; they are staged before, if it can stage them.

        Every rank must call it. Returns the seconds by ``clock`` that it waited for the sampler's requests.
        """
        doing = f"giving the sampler the weights after step {version}"
        with all_gathered(named_tensors) as tensors:
            update: Callable[[], None] = partial(sampler.update_weights, tensors, version)
            with plugin_code(doing, SamplerError):
                if isinstance(sampler, StagesWeights):  # while the next batch is still being sampled
                    update = sampler.stage_weights(tensors, version)
            staged = clock()
            self.finish()
            waited = clock() - staged
            with plugin_code(doing, SamplerError):
                update()
        return waited

    def _begun(self, step: int) -> bool:
        return step in self._running or step in self._complete_batches

    def _begin(self, step: int, on_scored: Callable[[], None]) -> None:
        self._running[step] = self._loop.submit(self._in_turn(self._rollout.first_round(step), on_scored))

    def _complete(self, step: int) -> None:
        if step in self._running:
            self._complete_batches[step] = complete_batch(
                self._running.pop(step).result(),
                self._rollout.first_round(step),
                rollout=self._rollout,
                batch_filter=self._filter,
                run_round=self._run_round,
            )

    def _run_round(self, extra: Round) -> Scored:
        self._observer.phase(f"step {extra.step}: sampling more problems", self._rollout.size(extra))
        return self._loop.submit(self._in_turn(extra, self._observer.advance)).result()

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
