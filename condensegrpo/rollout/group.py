"""Many episodes at once: one asyncio task a trajectory, one group a problem, and nobody waits for anybody's turn."""

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
    abort: asyncio.Event | None = None,
) -> tuple[tuple[Trajectory, ...], ...]:
    """``samples`` trajectories of every problem.

    Group ``7-gsm8k-12`` of step 7 holds the trajectories ``7-gsm8k-12-0``, ``7-gsm8k-12-1``, …. An episode that
    fails or hangs costs only itself.

    Args:
        problems: by a name that is unique in the whole batch, see ``named``. The name is part of the ids of groups and
            trajectories and names the random streams, so it must not depend on which share of the batch this is.
        on_finish: is awaited with each trajectory the moment it ends, in whatever order they do, while the others go
            on; what it raises stops the rollout.
        abort: once set, every episode that is under way ends as ``aborted``.

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
            abort=abort,
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
    finally:  # if one raised or the rollout was cancelled, nothing may go on behind the caller's back
        for task in flat:
            task.cancel()
        await asyncio.gather(*flat, return_exceptions=True)
    return tuple(tuple(task.result() for task in group) for group in tasks)


def named(problems: Sequence[Problem]) -> dict[str, Problem]:
    """The problems of a batch by unique names, in order: its id, and for an id that comes again ``id~2``, ``id~3``, ….

    To be applied to the whole batch of a step, before ranks take their shares: then two occurrences of one problem have
    random streams of their own, wherever they are sampled.

        a b a  ─▶  a: a   b: b   a~2: a
    """
    names: dict[str, Problem] = {}
    seen: Counter[str] = Counter()
    for problem in problems:
        seen[problem.id] += 1
        name = problem.id if seen[problem.id] == 1 else f"{problem.id}~{seen[problem.id]}"
        while name in names:  # the id of another problem
            name += "~"
        names[name] = problem
    return names
