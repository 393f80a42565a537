"""Sampling beside the learner: batches on an event loop of their own, in a thread that samples and does nothing else.

The thread that learns says which batches are begun (``schedule.py``), waits for what it needs, and alone talks to other
ranks. Batches are sampled one after another, each under one set of weights: those change only while nothing is sampled.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self

from condensegrpo.algorithms.staleness import check_staleness, newest, weights_go
from condensegrpo.core.trajectory import ScoredTrajectory
from condensegrpo.training.rig import Rig
from condensegrpo.training.rollout_step import Round, Sampled, completed, first_round, roll_out, trajectories_in

Scored = tuple[ScoredTrajectory, ...]
LEAVE_SECONDS = 60.0  # that the thread is waited for on leaving: a plug-in may block its loop for ever


class RolloutPrefetcher:
    """The batches of a run: sampled when they are asked for, or as far ahead as ``rollout.staleness`` allows."""

    def __init__(self, rig: Rig, sampled: Mapping[int, Sampled]) -> None:
        """Start the thread.

        Args:
            sampled: batches that there are already, by step: those of a checkpoint.
        """
        self._rig = rig
        self._sampled = dict(sampled)
        self._running: dict[int, Future[Scored]] = {}
        self._turn = asyncio.Lock()  # it lets batches in as they came
        self._closing = asyncio.Event()
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="rollout", daemon=True
        )  # a daemon: whatever a plug-in does there, the process can end
        self._thread.start()
        self._loop = started.result()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up what is being sampled and end the thread."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(LEAVE_SECONDS)

    def take(self, step: int) -> Sampled:
        """The batch of a step, and begin what may be sampled under the weights that the step starts from.

        Every rank must call it. What sampling raised is raised here.
        """
        config = self._rig.config
        staleness, now = config.rollout.staleness, not self._begun(step)
        if now:
            first = first_round(self._rig, step)
            self._rig.observer.phase(f"step {step}: sampling", trajectories_in(self._rig, first))
            self._begin(step, self._rig.observer.advance)
        else:
            self._rig.observer.phase(f"step {step}: waiting for trajectories", None)
        self._complete(step)
        if now or weights_go(step - 1, staleness):
            for later in range(step + 1, newest(step, staleness=staleness, steps=config.train.steps) + 1):
                if not self._begun(later):
                    self._begin(later, _nothing)
        sampled = self._sampled.pop(step)
        everything = (*sampled.kept, *sampled.masked, *sampled.dropped)
        check_staleness((one.trajectory for one in everything), step=step, staleness=staleness)
        return sampled

    @property
    def idle(self) -> bool:
        """Whether nothing is being sampled."""
        return not self._running

    def finish(self) -> dict[int, Sampled]:
        """Wait until nothing is sampled any more; the batches that no step has taken yet. Every rank must call it."""
        if self._running:
            self._rig.observer.phase("waiting for the trajectories of the next step", None)
        for step in sorted(self._running):
            self._complete(step)
        return dict(self._sampled)

    def _begun(self, step: int) -> bool:
        return step in self._running or step in self._sampled

    def _begin(self, step: int, seen: Callable[[], None]) -> None:
        self._running[step] = self._submit(partial(roll_out, self._rig, first_round(self._rig, step), seen))

    def _complete(self, step: int) -> None:
        if step in self._running:
            scored = self._running.pop(step).result()
            self._sampled[step] = completed(self._rig, first_round(self._rig, step), scored, self._more)

    def _more(self, one: Round) -> Scored:
        self._rig.observer.phase(f"step {one.step}: sampling more problems", trajectories_in(self._rig, one))
        return self._submit(partial(roll_out, self._rig, one, self._rig.observer.advance)).result()

    def _submit(self, work: Callable[[], Coroutine[Any, Any, Scored]]) -> Future[Scored]:
        return asyncio.run_coroutine_threadsafe(self._in_turn(work), self._loop)

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, Scored]]) -> Scored:
        async with self._turn:
            return await work()

    async def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        """Keep the loop alive; when this returns, ``asyncio.run`` cancels what is still under way and waits for it."""
        started.set_result(asyncio.get_running_loop())
        await self._closing.wait()


def _nothing() -> None:
    pass
