"""What one worker plays of a batch, and what becomes of it if the worker ends."""

import asyncio
import time
from dataclasses import dataclass, field

from condensegrpo.core.errors import CondenseError
from condensegrpo.core.failures import Failure
from condensegrpo.core.trajectory import ScoredTrajectory, Stop, Trajectory
from condensegrpo.rollout.collect import OnScored
from condensegrpo.rollout.group import ProblemGroup
from condensegrpo.rollout.scoring import with_score
from condensegrpo.rollout.workers.messages import Play, PlayReport


@dataclass(eq=False)
class BatchShare:
    """The groups of one worker. ``done`` is the end of the worker's play, or None if the worker ended before."""

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
