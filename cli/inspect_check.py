"""``inspect-trajectory --check``: the invariants of a trajectory file, in words where they are broken."""

import math
from collections.abc import Iterator, Sequence

from condensegrpo.algorithms.segments import check
from condensegrpo.cli.inspection import InspectedStep
from condensegrpo.core.trajectory import ScoredTrajectory
from condensegrpo.storage.credit import Credit


def breaches(step: InspectedStep) -> tuple[str, ...]:
    """Everything that is wrong with a step's trajectories and credit; empty: all is well."""
    found: list[str] = [*step.problems]
    for one in step.scored:
        found += [f"{one.trajectory.id}: {breach}" for breach in (*check(one.trajectory), *_of_score(one))]
    return (*found, *_of_groups(step.scored), *_of_credit(step))


def _of_score(one: ScoredTrajectory) -> Iterator[str]:
    """A score was finite when it was read; here it is held against its trajectory."""
    largest = one.trajectory.max_context_tokens
    if one.score.context_tokens != largest:
        yield f"the score counts {one.score.context_tokens} context tokens, its largest prompt has {largest}"
    if not 0 <= one.score.correct <= 1:
        yield f"correct is {one.score.correct}, wanted a number from 0 to 1"


def _of_groups(scored: Sequence[ScoredTrajectory]) -> Iterator[str]:
    problems: dict[str, str] = {}
    ids: set[str] = set()
    for one in scored:
        group, problem = one.trajectory.group_id, one.trajectory.problem_id
        if problems.setdefault(group, problem) != problem:
            yield f"group {group} holds problem {problems[group]} and, in {one.trajectory.id}, problem {problem}"
        if one.trajectory.id in ids:
            yield f"{one.trajectory.id} is in the file twice"
        ids.add(one.trajectory.id)


def _of_credit(step: InspectedStep) -> Iterator[str]:
    if step.credit is None:
        return
    turns = {one.trajectory.id: len(one.trajectory.turns) for one in step.scored}
    for name in turns:
        if name not in step.credit:
            yield f"{name} has no credit"
    for name, credit in step.credit.items():
        if name not in turns:
            yield f"the credit of {name} belongs to no trajectory of the file"
            continue
        yield from (f"{name}: {breach}" for breach in _of_numbers(credit, turns[name]))


def _of_numbers(credit: Credit, turns: int) -> Iterator[str]:
    if len(credit.advantages) != turns:
        yield f"it has {turns} turns and credit for {len(credit.advantages)}"
    for index, (advantage, weight) in enumerate(zip(credit.advantages, credit.weights, strict=True)):
        if not math.isfinite(advantage):
            yield f"the advantage of turn {index} is {advantage}"
        if not (math.isfinite(weight) and weight >= 0):
            yield f"the token weight of turn {index} is {weight}, wanted a finite number of at least 0"
