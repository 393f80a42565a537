"""Roll out and score: problems in, scored trajectories out, each reported as soon as it is scored."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from condensegrpo.core.errors import RolloutError
from condensegrpo.core.protocols import Environment, GroupReward, Problem, Reward
from condensegrpo.core.trajectory import Score, ScoredTrajectory, Stop, Trajectory
from condensegrpo.rollout.engine import Engine
from condensegrpo.rollout.group import rollout
from condensegrpo.rollout.scoring import score, score_group

OnScored = Callable[[ScoredTrajectory], None]
FAILURES = frozenset({Stop.SAMPLER_ERROR, Stop.ENVIRONMENT_ERROR})  # stops that are an error, not a decision


class Failures(NamedTuple):
    """How many trajectories ended with an error."""

    failed: int
    trajectories: int  # sampled in all
    first: str  # stop and detail of the first failure; empty: no failure


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scorer:
    """Scores trajectories as they finish: each by itself, or a whole group once it is complete."""

    problems: Mapping[str, Problem]  # by id
    samples: int  # trajectories in a group
    reward: Reward | GroupReward
    on_scored: OnScored
    groups: dict[str, list[Trajectory]] = field(default_factory=lambda: defaultdict(list))  # finished so far, by id
    scored: dict[str, ScoredTrajectory] = field(default_factory=dict)  # by id of the trajectory

    async def add(self, trajectory: Trajectory) -> None:
        """Score a finished trajectory, or its group if it is the last one of it. Rewards run in threads."""
        problem = self.problems[trajectory.problem_id]
        if not isinstance(self.reward, GroupReward):
            self._report(trajectory, await asyncio.to_thread(score, trajectory, problem, self.reward))
            return
        group = self.groups[trajectory.group_id]
        group.append(trajectory)
        if len(group) == self.samples:
            group.sort(key=lambda member: member.sample)
            scores = await asyncio.to_thread(score_group, group, problem, self.reward)
            for member, member_score in zip(group, scores, strict=True):
                self._report(member, member_score)

    def _report(self, trajectory: Trajectory, score: Score) -> None:
        self.scored[trajectory.id] = ScoredTrajectory(trajectory=trajectory, score=score)
        self.on_scored(self.scored[trajectory.id])


async def collect(
    problems: Mapping[str, Problem],
    *,
    samples: int,
    environment: Callable[[Problem], Environment],
    engine: Engine,
    reward: Reward | GroupReward,
    run_seed: int,
    step: int,
    on_scored: OnScored,
) -> tuple[ScoredTrajectory, ...]:
    """``samples`` scored trajectories of every problem: group by group in the order of the problems.

    Args:
        problems: by a name that is unique in the batch, see ``rollout.group.named``.
        reward: a ``Reward`` scores each trajectory as it finishes; a ``GroupReward`` scores all trajectories of a
            group, failed ones included, when the last one has finished. It is called in threads, several at a time,
            so that a slow reward delays no episode.
        on_scored: called with each trajectory once it is scored, in the order in which they finish; with a
            ``GroupReward`` by groups, in the order of sample numbers, and after an interruption not with the
            trajectories of unfinished groups.
        run_seed: names the random streams, together with ``step`` and the problem's name.
    """
    by_id = {problem.id: problem for problem in problems.values()}
    scorer = _Scorer(problems=by_id, samples=samples, reward=reward, on_scored=on_scored)
    groups = await rollout(
        problems,
        samples=samples,
        environment=environment,
        engine=engine,
        run_seed=run_seed,
        step=step,
        on_finish=scorer.add,
    )
    return tuple(scorer.scored[trajectory.id] for group in groups for trajectory in group)


def failures_of(scored: Sequence[ScoredTrajectory]) -> Failures:
    """The failures among some trajectories: each rank counts its own, ``report_failures`` takes those of all ranks."""
    failed = [member.trajectory for member in scored if member.trajectory.stop in FAILURES]
    first = f"({failed[0].stop}): {failed[0].detail}" if failed else ""
    return Failures(failed=len(failed), trajectories=len(scored), first=first)


def report_failures(ranks: Sequence[Failures], say: Callable[[str], None]) -> None:
    """Say how many trajectories failed, if any: a single failure is data, but if all fail, something is broken.

    Args:
        ranks: of every rank, so that all ranks raise, or none does and no rank waits for another that has left.

    Raises:
        RolloutError: every trajectory failed; the message holds the detail of the first one.
    """
    failed, trajectories = sum(rank.failed for rank in ranks), sum(rank.trajectories for rank in ranks)
    if not failed:
        return
    first = next(rank.first for rank in ranks if rank.failed)
    message = f"{failed} of {trajectories} trajectories failed; the first {first}"
    if failed == trajectories:
        raise RolloutError(message)
    say(message)
