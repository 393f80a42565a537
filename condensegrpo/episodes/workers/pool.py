"""The workers of a rank: a batch is divided among them by whole groups.

Trajectories do not depend on the number of workers: their random streams are named by what they are, and the sampler
answers every request by itself.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from condensegrpo.core.protocols import Attends, Sampler
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.episodes.collect import OnScored
from condensegrpo.episodes.group import ProblemGroup
from condensegrpo.episodes.workers.messages import Play, PlayReport, Setup
from condensegrpo.episodes.workers.worker import StartedWorker, Worker, WorkerBatch

CLOSE_SECONDS = 2.0  # that the workers have to end by themselves


class WorkerHost(Protocol):
    """Starts workers: as processes of this machine, or elsewhere."""

    def start(self, number: int) -> Sequence[StartedWorker]:
        """Start some workers. It may wait, and is called in a thread.

        Raises:
            RolloutError: they cannot be started.
        """

    def close(self) -> None:
        """End all workers at once. May be called twice."""


class WorkerPool:
    """Workers that are started when they are first needed, and replaced when they end. One batch at a time."""

    def __init__(self, host: WorkerHost, sampler: Sampler, model: Callable[[str], Attends]) -> None:
        """Start nothing yet.

        Args:
            sampler: of the rank; it is asked on the event loop of ``play``.
            model: the frozen model of a scorer, by folder or Hub id.
        """
        self._host, self._sampler, self._model = host, sampler, model
        self._workers: list[Worker] = []
        self._numbers = count()

    async def play(
        self,
        setup: Setup,
        batch: Sequence[ProblemGroup],
        *,
        workers: int,
        samples: int,
        stream: tuple[int, int],
        turn_seconds: float,
        on_scored: OnScored,
    ) -> tuple[tuple[ScoredTrajectory, ...], tuple[PlayReport, ...]]:
        """Play a batch.

        Args:
            setup: of the player; a worker that has a player with this key keeps it.
            workers: how many take part, at most one for each group.
            stream: run seed and step, which name the random streams.
            turn_seconds: for which a call of the sampler may hold up the event loop.

        Returns:
            The trajectories in the order of the batch, and what the workers report at the end.

        Raises:
            RolloutError: the workers cannot be started or set up, or a problem cannot be sent to them.
        """
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        playing, batches = await self._ready(workers), list[WorkerBatch]()
        try:
            for index, worker in enumerate(playing):
                groups = tuple(batch[index::workers])
                play = Play(number, setup.key, groups, samples, *stream, self._sampler.version)
                batches.append(WorkerBatch(play, on_scored, loop.create_future()))
                worker.begin(batches[-1], setup, turn_seconds)
            ended = await asyncio.gather(*(each.done for each in batches))
        finally:
            for worker in playing:
                worker.rest()
        scored = {name: each for part in batches for name, each in part.scored.items()}
        ordered = tuple(scored[f"{group.id}/{sample}"] for group in batch for sample in range(samples))
        return ordered, tuple(played for played in ended if played is not None)

    def close(self) -> None:
        """End all workers. May be called twice."""
        workers, self._workers = self._workers, []
        deadline = time.monotonic() + CLOSE_SECONDS
        for worker in workers:
            worker.ask_to_end()
        for worker in workers:
            worker.end(max(deadline - time.monotonic(), 0.0))
        self._host.close()

    async def _ready(self, number: int) -> list[Worker]:
        """That many workers."""
        for worker in [each for each in self._workers if each.has_ended()]:
            worker.end()
            self._workers.remove(worker)
        missing = number - len(self._workers)
        if missing > 0:
            started = await asyncio.to_thread(self._host.start, missing)
            self._workers += [Worker(each, self._sampler, self._model) for each in started]
        return self._workers[:number]
