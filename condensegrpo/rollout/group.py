"""Many episodes at once: one asyncio task per trajectory, one group per problem, no per-turn barrier."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from condensegrpo.core.protocols import Environment, Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rollout.engine import Engine
from condensegrpo.rollout.episode import run_episode
from condensegrpo.rollout.randomness import problem_draw, stream_seed


async def rollout(
    problems: Mapping[str, Problem],
    *,
    samples: int,
    environment: Callable[[Problem], Environment],
    engine: Engine,
    run_seed: int,
    step: int,
    on_finish: Callable[[Trajectory], Awaitable[None]],
) -> tuple[tuple[Trajectory, ...], ...]:
    """``samples`` trajectories of every problem.

    Group ``7-gsm8k-12`` of step 7 holds the trajectories ``7-gsm8k-12-0``, ``7-gsm8k-12-1``, …. A failed or
    hanging episode affects no other.

    Args:
        problems: by a name that is unique in the whole batch, see ``named``. The name is part of the ids of groups and
            trajectories and names the random streams, so it must not depend on which share of the batch this is.
        on_finish: awaited with each trajectory as soon as it ends, while others go on; an exception stops the rollout.

    Returns:
        One group a problem in the order of the problems, trajectories in the order of their sample number.
    """

    async def play(problem: Problem, name: str, sample: int) -> Trajectory:
        trajectory = await run_episode(
            problem,
            environment=environment,
            engine=engine,
            group_id=f"{step}-{name}",
            sample=sample,
            seed=partial(stream_seed, run_seed, step, name, sample),
            draw=problem_draw(run_seed, step, name),
        )
        await on_finish(trajectory)
        return trajectory

    tasks = [
        [asyncio.create_task(play(problem, name, sample)) for sample in range(samples)]
        for name, problem in problems.items()
    ]
    flat = [task for group in tasks for task in group]
    try:
        await asyncio.gather(*flat)
    finally:  # after an exception or a cancellation no episode may go on
        for task in flat:
            task.cancel()
        await asyncio.gather(*flat, return_exceptions=True)
    return tuple(tuple(task.result() for task in group) for group in tasks)


def named(problems: Sequence[Problem]) -> dict[str, Problem]:
    """The problems of a batch by unique names, in order: its id, and for an id that comes again ``id~2``, ``id~3``, ….

    Apply it to the whole batch of a step, before ranks take their shares: then two occurrences of a problem have
    different random streams on every rank.

        a b a  ─▶  a: a   b: b   a~2: a
    """
    names: dict[str, Problem] = {}
    occurrences: Counter[str] = Counter()
    for problem in problems:
        occurrences[problem.id] += 1
        name = problem.id if occurrences[problem.id] == 1 else f"{problem.id}~{occurrences[problem.id]}"
        while name in names:  # the id of another problem
            name += "~"
        names[name] = problem
    return names
