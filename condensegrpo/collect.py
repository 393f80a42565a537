"""Roll out and score: problems in, scored trajectories out, each handed on the moment it is finished."""

from collections.abc import Callable, Mapping, Sequence

from condensegrpo.errors import RolloutError
from condensegrpo.protocols import Environment, Problem, Reward
from condensegrpo.rollout.episode import Engine
from condensegrpo.rollout.group import rollout
from condensegrpo.rollout.scoring import score
from condensegrpo.trajectory import ScoredTrajectory, Stop, Trajectory

OnScored = Callable[[ScoredTrajectory], None]
FAILURES = frozenset({Stop.SAMPLER_ERROR, Stop.ENVIRONMENT_ERROR})  # stops that are nobody's decision


async def collect(
    problems: Mapping[str, Problem],
    *,
    samples: int,
    environment: Callable[[Problem], Environment],
    engine: Engine,
    reward: Reward,
    run_seed: int,
    step: int,
    on_scored: OnScored,
) -> tuple[ScoredTrajectory, ...]:
    """``samples`` scored trajectories of every problem: group by group in the order of the problems.

    Args:
        problems: by a name that is unique in the batch, see ``rollout.group.named``.
        on_scored: sees each one as it finishes, in whatever order they do.
        run_seed: names the random streams, together with ``step`` and the problem's name.
    """
    by_id = {problem.id: problem for problem in problems.values()}
    scored: dict[str, ScoredTrajectory] = {}

    def finish(trajectory: Trajectory) -> None:
        problem = by_id[trajectory.problem_id]
        one = ScoredTrajectory(trajectory=trajectory, score=score(trajectory, problem, reward))
        scored[trajectory.id] = one
        on_scored(one)

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


def tell_failures(scored: Sequence[ScoredTrajectory], say: Callable[[str], None]) -> None:
    """One failed trajectory is data; that some failed should be known; if all did, something is broken.

    Raises:
        RolloutError: no trajectory came to an end of its own; the message has the first one's detail.
    """
    failed = [one.trajectory for one in scored if one.trajectory.stop in FAILURES]
    if not failed:
        return
    told = f"{len(failed)} of {len(scored)} trajectories failed; the first ({failed[0].stop}): {failed[0].detail}"
    if len(failed) == len(scored):
        raise RolloutError(told)
    say(told)
