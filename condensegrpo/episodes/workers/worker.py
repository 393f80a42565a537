"""The rank's end of one worker: sends it what it plays, and asks the sampler for what it requests."""

import asyncio
import socket
import time
from array import array
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

from condensegrpo.core.errors import CondenseError, RolloutError
from condensegrpo.core.failures import Failure, failure_of
from condensegrpo.core.protocols import Attends, AttentionQuery, Measures, Sampler, TokenAttention
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.shared_sequence import SharedSequence
from condensegrpo.core.trajectory import SamplingParams, Stop, Trajectory
from condensegrpo.episodes.boundary import Ended, guarded
from condensegrpo.episodes.collect import OnScored
from condensegrpo.episodes.group import ProblemGroup
from condensegrpo.episodes.sampling import generated
from condensegrpo.episodes.scoring import with_score
from condensegrpo.episodes.workers.connection import Connection
from condensegrpo.episodes.workers.messages import (
    PLAIN_DATA,
    Answer,
    Attend,
    Broken,
    Cancel,
    Close,
    Finished,
    Measure,
    Message,
    Play,
    PlayReport,
    Sample,
    SampledIds,
    SamplerRequest,
    Setup,
    Withdraw,
)

SAMPLER = "the sampler"


class StartedWorker(NamedTuple):
    """A worker that was started, perhaps not up yet."""

    end: socket.socket  # connected to it
    ended: Callable[[], str]  # ends it if it runs, and says how it ended: "was killed by signal 9"


@dataclass(eq=False)
class WorkerBatch:
    """The groups of a batch that one worker plays.

    ``done`` is the end of the worker's play, or None if the worker ended before.
    """

    play: Play
    on_scored: OnScored
    done: "asyncio.Future[PlayReport | None]"
    scored: dict[str, ScoredTrajectory] = field(default_factory=dict)  # by id
    began: float = field(default_factory=time.monotonic)

    def report(self, scored: ScoredTrajectory) -> None:
        """Record a trajectory."""
        if self.done.done():
            return
        self.scored[scored.trajectory.id] = scored
        try:
            self.on_scored(scored)
        except Exception as error:  # raised where the batch is awaited
            self.done.set_exception(error)

    def complete(self, played: PlayReport | None) -> None:
        """End it: all trajectories are recorded."""
        if not self.done.done():
            self.done.set_result(played)

    def fail(self, error: CondenseError) -> None:
        """End the batch."""
        if not self.done.done():
            self.done.set_exception(error)

    def lose(self, how: str) -> None:
        """End it because the worker has ended: what is not scored yet is recorded as failed.

        Args:
            how: the worker ended.
        """
        failure = Failure(source="a rollout worker", error="", message=how)
        for group in self.play.batch:
            for sample in range(self.play.samples):
                if f"{group.id}/{sample}" not in self.scored:
                    self.report(with_score(self._lost(group, sample, failure), failure))
        self.complete(None)

    def _lost(self, group: ProblemGroup, sample: int, failure: Failure) -> Trajectory:
        return Trajectory(
            id=f"{group.id}/{sample}",
            problem_id=group.problem.id,
            group_id=group.id,
            sample=sample,
            question=group.problem.question,
            ground_truth=group.problem.answer,
            turns=(),
            stop=Stop.ENVIRONMENT_ERROR,
            answer=None,
            seconds=time.monotonic() - self.began,
            detail=str(failure),
            failure=failure,
        )


class Worker:
    """One worker, which plays part of one batch at a time."""

    def __init__(self, started: StartedWorker, sampler: Sampler, model: Callable[[str], Attends]) -> None:
        """Take over a worker; the other arguments are those of ``WorkerPool``."""
        self._connection = Connection(started.end)
        self._ended = started.ended
        self._sampler = sampler
        self._model = model
        self._keys: set[int] = set()  # of the players that it has
        self._prompts: dict[str, SharedSequence[int]] = {}  # the last one, by id of the trajectory
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._playing: WorkerBatch | None = None
        self._turn_seconds = 0.0
        self._how = ""  # it ended

    def begin(self, playing: WorkerBatch, setup: Setup, turn_seconds: float) -> None:
        """Let it play its part of a batch, on the running event loop.

        Raises:
            RolloutError: a problem cannot be sent.
        """
        self._playing, self._turn_seconds = playing, turn_seconds
        self._connection.attach(self._received, on_unreadable=self._unreadable, on_end=self._end)
        if setup.key not in self._keys:
            self._keys.add(setup.key)
            self._connection.send(setup)
        try:
            self._connection.send(playing.play)
        except Exception as error:  # the boundary to a task's data
            sending = f"sending problems to a rollout worker: {failure_of('', error)}"
            raise RolloutError(f"{sending}. {PLAIN_DATA}.") from error

    def rest(self) -> None:
        """Let it wait for the next batch; an unfinished one is cancelled."""
        playing, self._playing = self._playing, None
        for task in self._requests.values():
            task.cancel()
        if playing is not None and not playing.done.done():
            playing.done.cancel()
            self._connection.send(Cancel(playing.play.number))
        self._connection.detach()

    def has_ended(self) -> bool:
        """Whether it has ended."""
        return bool(self._how) or self._connection.ended(0.0)

    def ask_to_end(self) -> None:
        """Ask it to end by itself."""
        if not self._how:
            self._connection.send(Close())

    def end(self, seconds: float = 0.0) -> str:
        """End it, if it does not end by itself within some seconds. Returns how it ended."""
        if not self._how:
            self._connection.ended(seconds)
            self._how = self._ended()
            self._connection.close()
        return self._how

    def _received(self, message: Message) -> None:
        playing = self._playing
        match message:
            case SamplerRequest(number, call):
                self._requests[number] = task = asyncio.create_task(self._answer(number, self._work(call)))
                task.add_done_callback(lambda _: self._requests.pop(number, None))
            case Withdraw(number) if number in self._requests:
                self._requests[number].cancel()
            case Finished(play, scored) if playing is not None and playing.play.number == play:
                self._prompts.pop(scored.trajectory.id, None)
                playing.report(scored)
            case PlayReport(play) if playing is not None and playing.play.number == play:
                playing.complete(message)
            case Broken(error) if playing is not None:
                playing.fail(error)

    def _unreadable(self, error: Exception) -> None:
        if self._playing is not None:
            self._playing.fail(RolloutError(f"reading what a rollout worker sent: {failure_of('', error)}."))

    def _end(self) -> None:
        """It has ended by itself: unfinished trajectories are lost."""
        if self._playing is not None:
            self._playing.lose(self.end())

    async def _answer(self, number: int, work: Callable[[], Coroutine[object, object, object]]) -> None:
        value: object
        try:
            value = await guarded(
                work,
                who=SAMPLER,
                stop=Stop.SAMPLER_ERROR,
                turn_seconds=self._turn_seconds,
                plugin=self._sampler,
            )
        except Ended as end:
            value = end.failure or Failure(source=SAMPLER, error="", message=end.detail)
        self._connection.send(Answer(number, value))

    def _work(self, call: Sample | Measure | Attend) -> Callable[[], Coroutine[object, object, object]]:
        """The call of the sampler. Prompts are put together here, in the order in which they arrive."""
        match call:
            case Sample(kept, new, params):
                last = self._prompts.get(params.trajectory)
                prompt = last.extended(new) if last is not None and kept else SharedSequence(new)
                self._prompts[params.trajectory] = prompt
                return partial(self._sample, prompt, params)
            case Measure(prompt_ids, output_ids):
                return partial(self._measure, tuple(prompt_ids), tuple(output_ids))
            case Attend(model, query):
                return partial(self._attend, model, query)

    async def _sample(self, prompt: Sequence[int], params: SamplingParams) -> SampledIds:
        reply = await generated(self._sampler, prompt, params)
        return SampledIds(array("I", reply.token_ids), array("d", reply.logprobs), reply.finish)

    async def _measure(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> "array[float]":
        return array("d", await cast(Measures, self._sampler).measure(prompt_ids, output_ids))

    async def _attend(self, model: str, query: AttentionQuery) -> TokenAttention:
        attends = self._model(model) if model else cast(Attends, self._sampler)
        return await attends.attend(query)
