"""The rank's side: a batch is divided among the workers by whole groups, and the sampler answers their requests.

Trajectories do not depend on the number of workers: their random streams are named by what they are, and the sampler
answers every request by itself.
"""

import asyncio
import pickle
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol, cast

from condensegrpo.core.errors import CondenseError, RolloutError
from condensegrpo.core.failures import PluginFailure, failure_of
from condensegrpo.core.protocols.sampler import AttentionSampler, LogprobSampler, Sampler
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.episodes.boundary import EndEpisode, call_plugin
from condensegrpo.episodes.group import ProblemGroup
from condensegrpo.episodes.player import OnScored
from condensegrpo.episodes.sampling import generated
from condensegrpo.episodes.scoring import with_score
from condensegrpo.episodes.workers.messages import PLAIN_DATA, Answer, Play, PlayReport, SamplerRequest, Setup, Withdraw

SAMPLER = "the sampler"


class WorkerHandle(Protocol):
    """A worker that was started, perhaps not up yet."""

    def messages(self, play: bytes) -> AsyncGenerator[bytes, None]:
        """Send a pickled ``Play``, and receive pickled messages until the worker ends."""

    def send(self, data: bytes) -> None:
        """Send a pickled message during a play; it is dropped if the worker has ended."""

    def is_idle(self) -> bool:
        """Whether it runs. Called between plays."""

    def end(self) -> str:
        """End it at once, unless it has ended. It may wait, and is called in a thread.

        Returns:
            How it ended: "was killed by signal 9".
        """


class WorkerHost(Protocol):
    """Starts workers: as processes of this machine, or elsewhere."""

    def start(self, number: int) -> Sequence[WorkerHandle]:
        """Start some workers; fewer of them where the others need long. It may wait, and is called in a thread."""

    def close(self) -> None:
        """End all workers. May be called twice."""


class WorkerPool:
    """Workers that are started when they are first needed, and replaced when they end. One batch at a time."""

    def __init__(self, host: WorkerHost, sampler: Sampler, model: Callable[[str], AttentionSampler]) -> None:
        """Start nothing yet.

        Args:
            sampler: of the rank; it is called on the event loop of ``play``.
            model: the frozen model of a scorer, by folder or Hub id.
        """
        self._host, self._sampler, self._model = host, sampler, model
        self._workers: list[WorkerHandle] = []
        self._playing = asyncio.Lock()

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
        """Play a batch, after the one that is played. If it is cancelled or fails, workers that still play are ended.

        Args:
            workers: how many take part, at most one for each group; fewer where lost ones cannot be replaced yet.
            stream: run seed and step, which name the random streams.
            turn_seconds: for which a call of the sampler may block the event loop.

        Returns:
            The trajectories in the order of the batch, and the reports of the workers that did not end.
        """
        scored: dict[str, ScoredTrajectory] = {}

        def record(each: ScoredTrajectory) -> None:
            scored[each.trajectory.id] = each
            on_scored(each)

        async with self._playing:
            tasks, version = list[asyncio.Task[PlayReport | None]](), self._sampler.version
            ready = await self._ready(workers)
            for index, worker in enumerate(ready):
                play = Play(setup, tuple(batch[index :: len(ready)]), samples, *stream, version)
                tasks.append(asyncio.create_task(self._played(worker, play, turn_seconds, record)))
            try:
                reports = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        ordered = tuple(scored[f"{group.id}/{sample}"] for group in batch for sample in range(samples))
        return ordered, tuple(report for report in reports if report is not None)

    def close(self) -> None:
        """End all workers. May be called twice."""
        self._workers = []
        self._host.close()

    async def _ready(self, number: int) -> list[WorkerHandle]:
        """That many workers, or at least one; those that have ended are replaced."""
        for worker in [each for each in self._workers if not each.is_idle()]:
            await self._end(worker)
        missing = number - len(self._workers)
        if missing > 0:
            self._workers += await asyncio.to_thread(self._host.start, missing)
        if not self._workers:
            raise RolloutError(f"replacing {number} rollout workers that were lost: none of them is up again.")
        return self._workers[:number]

    async def _end(self, worker: WorkerHandle) -> str:
        self._workers.remove(worker)
        return await asyncio.to_thread(worker.end)

    async def _played(
        self, worker: WorkerHandle, play: Play, turn_seconds: float, record: OnScored
    ) -> PlayReport | None:
        """Let a worker play some groups; None: it ended, and trajectories without a score are recorded as lost."""
        missing = {f"{group.id}/{sample}": (group, sample) for group in play.batch for sample in range(play.samples)}
        answers: dict[int, asyncio.Task[None]] = {}
        began = time.monotonic()

        def begin_answer(request: SamplerRequest) -> None:
            task = answers[request.number] = asyncio.create_task(self._answer(request, worker, turn_seconds))
            task.add_done_callback(lambda _: answers.pop(request.number))

        try:
            async with aclosing(worker.messages(_pickled(play))) as messages:
                async for data in messages:
                    match _unpickled(data):
                        case SamplerRequest() as request:
                            begin_answer(request)
                        case Withdraw(number) if number in answers:
                            answers[number].cancel()
                        case ScoredTrajectory() as scored:
                            del missing[scored.trajectory.id]
                            record(scored)
                        case PlayReport() as report:
                            return report
                        case CondenseError() as error:
                            raise error
            failure = PluginFailure(source="a rollout worker", error="", message=await self._end(worker))
            for group, sample in missing.values():
                record(_lost(group, sample, failure, time.monotonic() - began))
            return None
        except BaseException:
            if worker in self._workers:
                await self._end(worker)
            raise
        finally:
            for task in answers.values():
                task.cancel()

    async def _answer(self, request: SamplerRequest, worker: WorkerHandle, turn_seconds: float) -> None:
        work = partial(self._called, request)
        try:
            value = await call_plugin(
                work, who=SAMPLER, stop=StopReason.SAMPLER_ERROR, turn_seconds=turn_seconds, plugin=self._sampler
            )
        except EndEpisode as end:
            value = end.failure or PluginFailure(source=SAMPLER, error="", message=end.detail)
        try:
            data = pickle.dumps(Answer(request.number, value), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # what a sampler of a user's returned: the worker must not wait for it for ever
            data = pickle.dumps(Answer(request.number, failure_of(SAMPLER, error, plugin=self._sampler)))
        worker.send(data)

    async def _called(self, request: SamplerRequest) -> object:
        model = self._model(request.model) if request.model else self._sampler
        match request.method:
            case "sample":
                return await generated(self._sampler, *request.arguments)
            case "measure":
                return tuple(await cast(LogprobSampler, model).measure(*request.arguments))
            case "attend":
                return await cast(AttentionSampler, model).attend(*request.arguments)


def _pickled(play: Play) -> bytes:
    try:
        return pickle.dumps(play, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # the boundary to a task's data
        sending = f"sending problems to a rollout worker: {failure_of('', error)}"
        raise RolloutError(f"{sending}. {PLAIN_DATA}.") from error


def _unpickled(data: bytes) -> object:
    try:
        return pickle.loads(data)
    except Exception as error:  # such as a class that only the worker can import
        raise RolloutError(f"reading what a rollout worker sent: {failure_of('', error)}.") from error


def _lost(group: ProblemGroup, sample: int, failure: PluginFailure, seconds: float) -> ScoredTrajectory:
    """A trajectory whose worker ended."""
    trajectory = Trajectory(
        id=f"{group.id}/{sample}",
        problem_id=group.problem.id,
        group_id=group.id,
        sample=sample,
        question=group.problem.question,
        ground_truth=group.problem.answer,
        turns=(),
        stop=StopReason.ENVIRONMENT_ERROR,
        answer=None,
        seconds=seconds,
        detail=str(failure),
        failure=failure,
    )
    return with_score(trajectory, failure)
