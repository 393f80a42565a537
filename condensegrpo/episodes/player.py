"""Roll out and score: problems in, scored trajectories out, each reported as soon as it is scored.

``LocalPlayer`` plays in this process; ``assembly/workers.py`` plays in others.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from condensegrpo.core.failures import PluginFailure
from condensegrpo.core.protocols.environment import Environment
from condensegrpo.core.protocols.reward import GroupReward, Reward
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.threads import to_thread
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.boundary import Boundary, EndEpisode
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.group import ProblemGroup, rollout_groups
from condensegrpo.episodes.scoring import reward_name, score, score_group, with_score

T = TypeVar("T")
OnScored = Callable[[ScoredTrajectory], None]
CALLS_AT_A_TIME = min(32, (os.cpu_count() or 1) + 4)  # of the reward, as many as ``asyncio.to_thread`` would run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scorer:
    """Scores trajectories as they finish: each by itself, or a whole group once it is complete."""

    problems: Mapping[str, Problem]  # by id of the group: two problems of a task may have one id
    samples: int  # trajectories in a group
    reward: Reward | GroupReward
    seconds: float  # that one call of the reward may take
    on_scored: OnScored
    groups: dict[str, list[Trajectory]] = field(default_factory=lambda: defaultdict(list))  # finished so far, by id
    scored: dict[str, ScoredTrajectory] = field(default_factory=dict)  # by id of the trajectory
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CALLS_AT_A_TIME))

    async def add(self, trajectory: Trajectory) -> None:
        """Score a finished trajectory, or its group if it is the last one of it."""
        problem = self.problems[trajectory.group_id]
        if not isinstance(self.reward, GroupReward):
            outcome = await self._called(partial(score, trajectory, problem, self.reward))
            self._report(with_score(trajectory, outcome))
            return
        group = self.groups[trajectory.group_id]
        group.append(trajectory)
        if len(group) == self.samples:
            group.sort(key=lambda member: member.sample)
            outcomes = await self._called(partial(score_group, group, problem, self.reward))
            for index, member in enumerate(group):
                self._report(with_score(member, outcomes if isinstance(outcomes, PluginFailure) else outcomes[index]))

    async def _called(self, call: Callable[[], T]) -> T | PluginFailure:
        """The result of a call of the reward: in a thread of its own, a few at a time."""
        setting = "rollout.limits.reward_seconds"
        try:
            async with self.slots, Boundary(reward_name(self.reward), seconds=self.seconds, setting=setting):
                return await to_thread(call)
        except EndEpisode as end:
            return end.failure or PluginFailure(source=reward_name(self.reward), error="", message=end.detail)

    def _report(self, scored: ScoredTrajectory) -> None:
        self.scored[scored.trajectory.id] = scored
        self.on_scored(scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlayer:
    """Plays groups in this process and scores them."""

    environment: Callable[[Problem], Environment]
    engine: Engine
    reward: Reward | GroupReward

    async def play(
        self, batch: Sequence[ProblemGroup], *, samples: int, run_seed: int, step: int, on_scored: OnScored
    ) -> tuple[ScoredTrajectory, ...]:
        """``samples`` scored trajectories of every problem: group by group in the order of the batch.

        A ``Reward`` scores each trajectory as it finishes; a ``GroupReward`` scores all trajectories of a group, failed
        ones included, when the last one has finished. It is called in threads, several at a time, so that a slow reward
        delays no episode. One that raises or takes longer than ``reward_seconds`` ends its trajectory or group as
        ``reward_error``.

        Args:
            batch: of ``episodes.group.problem_groups``, or a share of them.
            run_seed: names the random streams, together with ``step`` and the group's name.
            step: of training, or below 0 of an evaluation: with its context budget, see ``Engine.at_step``.
            on_scored: called with each trajectory once it is scored, in the order in which they finish; with a
                ``GroupReward`` by groups, in the order of sample numbers, and after an interruption not with the
                trajectories of unfinished groups.
        """
        engine = self.engine.at_step(step)
        scorer = _Scorer(
            problems={group.id: group.problem for group in batch},
            samples=samples,
            reward=self.reward,
            seconds=engine.limits.reward_seconds,
            on_scored=on_scored,
        )
        groups = await rollout_groups(
            batch,
            samples=samples,
            environment=self.environment,
            engine=engine,
            run_seed=run_seed,
            step=step,
            on_finish=scorer.add,
        )
        return tuple(scorer.scored[trajectory.id] for group in groups for trajectory in group)

    def counts(self) -> Mapping[str, float]:
        """The counts of the condenser since the last call."""
        return {str(name): float(value) for name, value in self.engine.condenser.counts().items()}

    @property
    def condensing_seconds(self) -> float:
        """Seconds that the condenser was at work, see ``Stopwatch``."""
        return self.engine.stopwatch.seconds
