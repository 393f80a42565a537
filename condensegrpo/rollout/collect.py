"""Roll out and score: problems in, scored trajectories out, each handed on the moment it can be scored."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from condensegrpo.core.errors import RolloutError
from condensegrpo.core.protocols import Environment, GroupReward, Problem, Reward
from condensegrpo.core.trajectory import Score, ScoredTrajectory, Stop, Trajectory
from condensegrpo.rollout.episode import Engine
from condensegrpo.rollout.group import rollout
from condensegrpo.rollout.scoring import score, score_group

OnScored = Callable[[ScoredTrajectory], None]
FAILURES = frozenset({Stop.SAMPLER_ERROR, Stop.ENVIRONMENT_ERROR})  # stops that are nobody's decision


class Failures(NamedTuple):
    """How many trajectories failed for reasons that are nobody's decision."""

    failed: int
    trajectories: int  # that were sampled
    first: str  # stop and detail of the first that failed; empty: none did


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
        reward: one of single trajectories scores each as it finishes; a group reward scores all of a group, failed
            ones included, when its last one has finished. It is called in threads, several at a time, so that one that
            runs code or waits holds up no episode.
        on_scored: sees each one once it is scored, in whatever order they finish; those of a group reward by groups,
            in the order of their sample numbers. Of a rollout that is interrupted it never sees unfinished groups then.
        run_seed: names the random streams, together with ``step`` and the problem's name.
    """
    by_id = {problem.id: problem for problem in problems.values()}
    waiting: dict[str, list[Trajectory]] = defaultdict(list)  # by group, with a group reward
    scored: dict[str, ScoredTrajectory] = {}

    def hand_on(trajectory: Trajectory, its: Score) -> None:
        one = ScoredTrajectory(trajectory=trajectory, score=its)
        scored[trajectory.id] = one
        on_scored(one)

    async def finish(trajectory: Trajectory) -> None:
        problem, group = by_id[trajectory.problem_id], waiting[trajectory.group_id]
        if not isinstance(reward, GroupReward):
            hand_on(trajectory, await asyncio.to_thread(score, trajectory, problem, reward))
            return
        group.append(trajectory)
        if len(group) == samples:
            ordered = sorted(group, key=lambda one: (len(one.id), one.id))  # they end in a number: …-2 before …-10
            for one, its in zip(ordered, await asyncio.to_thread(score_group, ordered, problem, reward), strict=True):
                hand_on(one, its)

    groups = await rollout(
        problems,
        samples=samples,
        environment=environment,
        engine=engine,
        run_seed=run_seed,
        step=step,
        on_finish=finish,
    )
    return tuple(scored[trajectory.id] for group in groups for trajectory in group)


def failures_of(scored: Sequence[ScoredTrajectory]) -> Failures:
    """How many of some trajectories failed: a rank counts its own, and ``tell_failures`` hears of all ranks."""
    failed = [one.trajectory for one in scored if one.trajectory.stop in FAILURES]
    first = f"({failed[0].stop}): {failed[0].detail}" if failed else ""
    return Failures(failed=len(failed), trajectories=len(scored), first=first)


def tell_failures(shares: Sequence[Failures], say: Callable[[str], None]) -> None:
    """One failed trajectory is data; that some failed should be known; if all did, something is broken.

    Args:
        shares: of every rank, so that all of them come to the same end and none waits for one that has left.

    Raises:
        RolloutError: no trajectory came to an end of its own; the message has the first one's detail.
    """
    failed, trajectories = sum(share.failed for share in shares), sum(share.trajectories for share in shares)
    if not failed:
        return
    first = next(share.first for share in shares if share.failed)
    told = f"{failed} of {trajectories} trajectories failed; the first {first}"
    if failed == trajectories:
        raise RolloutError(told)
    say(told)
