"""Checks that no held-out problem of a run is trained on, by GRPO or by the warm start."""

from collections.abc import Iterator
from itertools import islice
from pprint import saferepr

from condensegrpo.assembly.components import Components, indices
from condensegrpo.assembly.demonstrations import made_turns
from condensegrpo.core.errors import DataError
from condensegrpo.core.protocols.task import Demonstrates, HasExpert, Problem

Content = tuple[str, str | None, str]
DEMONSTRATIONS = 500  # of a warm start that are compared, from the first: making one can take a millisecond


def check_disjoint(components: Components) -> None:
    """Compare what a run trains on with the problems of all its evaluations, by content: question, answer and data.

    Training problems are those of the run's steps, or all of the split where dynamic sampling may take any. Of the warm
    start they are the problems of its first ``DEMONSTRATIONS``; a demonstration without a problem is not compared.
    """
    config = components.config
    held_out = evaluated_problems(components)
    for source, problem in (*_trained(components), *_demonstrated(components)):
        if (evaluated := held_out.get(_content(problem))) is not None:
            raise DataError(
                f"checking the held-out problems of {config.name}: {evaluated} is also {problem.id} of {source}: "
                f"{problem.question[:80]!r}. Remove it from one of the two; else success measures memory. If they are "
                f"two problems, put what tells them apart into Problem.data."
            )


def evaluated_problems(components: Components) -> dict[Content, str]:
    """The held-out problems of all evaluations: content → where it is."""
    named: dict[Content, str] = {}
    for name, part in components.evaluations.items():
        for problem in part.held_out():
            named.setdefault(_content(problem), f"{problem.id} of the evaluation {name}")
    return named


def _trained(components: Components) -> Iterator[tuple[str, Problem]]:
    config, problems = components.config, components.problems("train")
    used: set[int] | range = range(len(problems))
    if not config.algorithm.resample_rounds:
        count, size = config.train.problems_per_step, len(problems)
        steps = range(min(config.train.steps, -(-size // count)))  # the first epoch has all problems
        used = {at for step in steps for at in indices(seed=config.seed, step=step, count=count, size=size)}
    yield from (("the training problems", problems[at]) for at in used)


def _demonstrated(components: Components) -> Iterator[tuple[str, Problem]]:
    config, task = components.config, components.task
    count = min(config.warm_start.steps * config.warm_start.turns_per_step, DEMONSTRATIONS)
    if count and isinstance(task, HasExpert):
        problems = components.problems("train")
        played = indices(seed=config.seed, step=0, count=min(count, len(problems)), size=len(problems))
        yield from (("the demonstrations of the warm start", problems[at]) for at in played)
    if not count or not isinstance(task, Demonstrates):
        return
    turns = islice(made_turns(task, config.seed), count)
    yield from (("the demonstrations of the warm start", turn.problem) for turn in turns if turn.problem is not None)


def _content(problem: Problem) -> Content:
    return " ".join(problem.question.split()), problem.answer, saferepr(problem.data)  # keys in order
