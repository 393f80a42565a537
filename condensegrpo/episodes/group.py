"""Many episodes at once: one asyncio task per trajectory, one group per problem, no per-turn barrier."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from condensegrpo.core.process import rare_collections
from condensegrpo.core.protocols.environment import Environment
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.episode import run_episode


def stream_seed(run_seed: int, step: int, problem_id: str, sample: int, turn: int) -> int:
    """The seed of one reply's random stream: 63 bits, the same in every process and on every machine.

    A trajectory then does not depend on who else was in a batch, on the order in which tools return, or on the number
    of ranks.

        stream_seed(0, 7, "gsm8k-12", 3, 0)   # run 0, step 7, the fourth trajectory of the problem, first turn
    """
    # the only free text comes last, so that no two names collide
    return _bits(f"{run_seed}/{step}/{sample}/{turn}/{problem_id}")


def problem_draw(run_seed: int, step: int, problem_id: str) -> float:
    """A number in [0, 1) that is equal for all trajectories of a problem."""
    return (_bits(f"{run_seed}/{step}/problem/{problem_id}") >> 10) / 2**53  # 53 bits, so that it never rounds to 1


def _bits(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class ProblemGroup:
    """A problem of a batch, which is sampled several times."""

    id: str  # step/problem, such as 6/12: problem 12 of the batch, counted from 0; needs no quotes in a shell
    name: str  # unique in the batch, of the problem's id; names the random streams
    problem: Problem


async def rollout_groups(
    batch: Iterable[ProblemGroup],
    *,
    samples: int,
    environment: Callable[[Problem], Environment],
    engine: Engine,
    run_seed: int,
    step: int,
    on_finish: Callable[[Trajectory], Awaitable[None]],
) -> tuple[tuple[Trajectory, ...], ...]:
    """``samples`` trajectories of every problem.

    Group ``7/12`` holds the trajectories ``7/12/0``, ``7/12/1``, …. A failed or hanging episode affects no other.

    Args:
        batch: of ``problem_groups``, or a share of them: ids and random streams do not depend on the share.
        step: names the random streams, together with ``run_seed`` and the group's name.
        on_finish: awaited with each trajectory as soon as it ends, while others go on; an exception stops the rollout.

    Returns:
        One group a problem in the order of the batch, trajectories in the order of their sample number.
    """

    async def play(group: ProblemGroup, sample: int) -> Trajectory:
        trajectory = await run_episode(
            group.problem,
            environment=environment,
            engine=engine,
            group_id=group.id,
            sample=sample,
            seed=partial(stream_seed, run_seed, step, group.name, sample),
            draw=problem_draw(run_seed, step, group.name),
        )
        await on_finish(trajectory)
        return trajectory

    tasks = [[asyncio.create_task(play(group, sample)) for sample in range(samples)] for group in batch]
    flat = [task for group in tasks for task in group]
    try:
        with rare_collections():
            await asyncio.gather(*flat)
    finally:  # after an exception or a cancellation no episode may go on
        for task in flat:
            task.cancel()
        await asyncio.gather(*flat, return_exceptions=True)
    return tuple(tuple(task.result() for task in group) for group in tasks)


def problem_groups(problems: Sequence[Problem], step: int) -> tuple[ProblemGroup, ...]:
    """The groups of a batch, in order. Their names are ids of problems; for one that comes again ``id~2``, ``id~3``, ….

    Apply it to the whole batch of a step, before ranks take their shares: then two occurrences of a problem have
    different random streams on every rank.

        a b a of step 6  ─▶  6/0 a   6/1 b   6/2 a~2

    Args:
        step: optimiser step that the batch is for, or that the policy has taken when it is evaluated; begins the ids.
    """
    names: dict[str, Problem] = {}
    occurrences: Counter[str] = Counter()
    for problem in problems:
        occurrences[problem.id] += 1
        name = problem.id if occurrences[problem.id] == 1 else f"{problem.id}~{occurrences[problem.id]}"
        while name in names:  # the id of another problem
            name += "~"
        names[name] = problem
    return tuple(
        ProblemGroup(id=f"{step}/{index}", name=name, problem=problem)
        for index, (name, problem) in enumerate(names.items())
    )
