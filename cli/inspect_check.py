"""``condensegrpo inspect --check``: the invariants of a trajectory file, in words where they are broken."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import typer
from rich.text import Text

from condensegrpo.algorithms.segments import check
from condensegrpo.core.scored_trajectory import ScoredTrajectory, figures_of
from condensegrpo.core.wording import counted
from condensegrpo.display import theme
from condensegrpo.display.theme import neutral
from condensegrpo.inspection.batches import credit_of
from condensegrpo.storage.codec import fields_of
from condensegrpo.storage.credit import Credit
from condensegrpo.storage.trajectories import ReadResult, read_trajectories


def print_breaches(files: Sequence[Path], *, as_json: bool) -> None:
    """Print what is wrong with trajectory files and their credit.

    Raises:
        TrajectoryFileError: a file is damaged.
        Exit: something is wrong, code 1.
    """
    read = {str(file): read_trajectories(file) for file in files}
    by_file = {str(file): breaches(read[str(file)], credit_of(file)) for file in files}
    if as_json:
        typer.echo(json.dumps({"version": 1, "breaches": by_file}))
    else:
        screen = theme.console()
        for file, breached in by_file.items():
            for breach in breached:
                screen.print(Text(f"✗ {neutral(breach)}", theme.BAD), soft_wrap=True)
            scored = read[file].trajectories
            trajectories = counted(len(scored), "trajectory", "trajectories")
            turns = counted(sum(len(each.trajectory.turns) for each in scored), "turn")
            verdict = counted(len(breached), "breach", "breaches") if breached else "no breach"
            screen.print(f"{file}: {trajectories}, {turns}, {verdict}", soft_wrap=True)
    if any(by_file.values()):
        raise typer.Exit(1)


def breaches(read: ReadResult, credit: Mapping[str, Credit] | None) -> tuple[str, ...]:
    """Everything that is wrong with a step's trajectories and credit, where there is any; empty: all is well."""
    broken: list[str] = [*read.problems]
    for scored in read.trajectories:
        broken += [f"{scored.trajectory.id}: {breach}" for breach in (*check(scored.trajectory), *_of_score(scored))]
    broken += _of_groups(read.trajectories)
    broken += _of_credit(read.trajectories, credit) if credit is not None else ()
    return tuple(broken)


def _of_score(scored: ScoredTrajectory) -> Iterator[str]:
    """A score was finite when it was read; here score and figures are compared with the trajectory."""
    largest = scored.trajectory.max_context_tokens
    if scored.score.context_tokens != largest:
        yield f"the score counts {scored.score.context_tokens} context tokens, its largest prompt has {largest}"
    if not 0 <= scored.score.correct <= 1:
        yield f"correct is {scored.score.correct}, wanted a number from 0 to 1"
    stored, computed = map(fields_of, (scored.figures, figures_of(scored.trajectory, scored.score)))
    for name, value in computed.items():
        if stored[name] != value:
            yield f"its figures have {name} {stored[name]}, its trajectory and score have {value}"


def _of_groups(trajectories: Sequence[ScoredTrajectory]) -> Iterator[str]:
    problems: dict[str, str] = {}
    ids: set[str] = set()
    for scored in trajectories:
        group, problem = scored.trajectory.group_id, scored.trajectory.problem_id
        if problems.setdefault(group, problem) != problem:
            yield f"group {group} holds problem {problems[group]} and, in {scored.trajectory.id}, problem {problem}"
        if scored.trajectory.id in ids:
            yield f"{scored.trajectory.id} is in the file twice"
        ids.add(scored.trajectory.id)


def _of_credit(trajectories: Sequence[ScoredTrajectory], given: Mapping[str, Credit]) -> Iterator[str]:
    turns = {scored.trajectory.id: len(scored.trajectory.turns) for scored in trajectories}
    yield from (f"{name} has no credit" for name in turns if name not in given)
    for name, credit in given.items():
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
