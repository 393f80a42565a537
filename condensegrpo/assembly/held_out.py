"""Checks of the problems of a run: none is evaluated and trained on, and the rewards can judge them."""

import time
from collections.abc import Iterator
from itertools import islice
from pprint import saferepr

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.data_order import problem_indices
from condensegrpo.assembly.demonstrations import made_turns
from condensegrpo.core.defaults import overrides
from condensegrpo.core.errors import DataError
from condensegrpo.core.protocols.task import Problem, Task
from condensegrpo.core.wording import plural

Content = tuple[str, str | None, str]
TRUTHS_SECONDS = 3.0  # for the check of ground truths: reading one as mathematics takes milliseconds
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


def check_truths(components: Components) -> Iterator[str]:
    """Check that the rewards can judge the problems of the run; yields how many there was no time for."""
    parts = [("the evaluation " + name, part, part.held_out()) for name, part in components.evaluations.items()]
    trained = ("the training problems", components, [problem for _, problem in _trained(components)])
    faults, checked, deadline = list[str](), 0, time.monotonic() + TRUTHS_SECONDS
    left = 0
    for source, part, problems in (trained, *parts):
        rewards = [each.reward for each in getattr(part.reward, "parts", ())] or [part.reward]
        checks = [check for reward in rewards if (check := getattr(reward, "check_problem", None))]
        for problem in problems if checks else ():
            if time.monotonic() > deadline:
                left += 1
                continue
            checked += 1
            try:
                for check in checks:
                    check(problem)
            except ValueError as error:
                faults.append(f"{problem.id} of {source}: {error}")
    if faults:
        raise DataError(
            f"checking the ground truths of {components.config.name}: {len(faults)} of {checked} cannot be judged, the "
            f"first is {faults[0]}"
        )
    if left:
        yield f"{plural(left, 'ground truth')} not checked before the run: it took longer than {TRUTHS_SECONDS:g} s"


def _trained(components: Components) -> Iterator[tuple[str, Problem]]:
    config, problems = components.config, components.problems("train")
    used: set[int] | range = range(len(problems))
    if not config.algorithm.resample_rounds:
        count, size = config.train.problems_per_step, len(problems)
        steps = range(min(config.train.steps, -(-size // count)))  # the first epoch has all problems
        used = {at for step in steps for at in problem_indices(seed=config.seed, step=step, count=count, size=size)}
    yield from (("the training problems", problems[at]) for at in used)


def _demonstrated(components: Components) -> Iterator[tuple[str, Problem]]:
    config, task = components.config, components.task
    count = min(config.warm_start.steps * config.warm_start.turns_per_step, DEMONSTRATIONS)
    if count and overrides(task, Task.expert):
        problems = components.problems("train")
        played = problem_indices(seed=config.seed, step=0, count=min(count, len(problems)), size=len(problems))
        yield from (("the demonstrations of the warm start", problems[at]) for at in played)
    if not count or not overrides(task, Task.demonstrations):
        return
    turns = islice(made_turns(task, config.seed), count)
    yield from (("the demonstrations of the warm start", turn.problem) for turn in turns if turn.problem is not None)


def _content(problem: Problem) -> Content:
    return " ".join(problem.question.split()), problem.answer, saferepr(problem.data)  # keys in order
