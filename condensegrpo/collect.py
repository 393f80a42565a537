"""Roll out and score: problems in, scored trajectories out, each handed on the moment it is finished."""

from collections.abc import Callable, Sequence

from condensegrpo.protocols import Environment, Problem, Reward
from condensegrpo.rollout.episode import Engine
from condensegrpo.rollout.group import rollout
from condensegrpo.rollout.scoring import score
from condensegrpo.trajectory import ScoredTrajectory, Trajectory

OnScored = Callable[[ScoredTrajectory], None]


async def collect(
    problems: Sequence[Problem],
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

    ``on_scored`` sees each one as it finishes, in whatever order they do. (run_seed, step) name the random streams.
    """
    by_id = {problem.id: problem for problem in problems}
    scored: dict[str, ScoredTrajectory] = {}

    def finish(trajectory: Trajectory) -> None:
        one = ScoredTrajectory(trajectory=trajectory, score=score(trajectory, by_id[trajectory.problem_id], reward))
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
