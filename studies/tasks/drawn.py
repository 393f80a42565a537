"""The problems of tasks that draw them from random numbers."""

import random
from collections.abc import Callable, Sequence

from condensegrpo.core.protocols.task import Problem, Split
from condensegrpo.tasks.drawn import EVAL_SHARE, DrawnProblems, is_eval_content

Draw = Callable[[random.Random, str], Problem]  # a problem with a label


def drawn_problems(
    split: Split,
    draw: Draw,
    content: Callable[[Problem], str],
    *,
    sizes: tuple[int, int],
    seeds: tuple[str, str],
    described: str = "problems",
    cure: str = "lower eval_problems",
) -> Sequence[Problem]:
    """The problems of a split; which content is held out depends on the content alone.

    Training problems are labelled train-0, train-1, … and made when they are read, each from the random numbers of its
    index. Evaluation problems are a list of different contents, labelled eval-0, eval-1, …, in the order of drawing.

    Args:
        draw: makes a problem, held out or not.
        content: of a problem, which decides whether it is held out.
        sizes: of the virtual sequence for training, and of the list.
        seeds: of the two.
        described: what is drawn, for the error.
        cure: what the user can do about the error.
    """

    def problem_of(index: int) -> Problem:
        rng = random.Random(f"{seeds[0]} {index}")
        while True:  # seven draws in eight are for training
            problem = draw(rng, f"train-{index}")
            if not is_eval_content(content(problem)):
                return problem

    if split == "train":
        return DrawnProblems(size=sizes[0], draw=problem_of)
    rng, chosen, count = random.Random(seeds[1]), dict[str, Problem](), sizes[1]
    for _ in range(100 * EVAL_SHARE * count):
        problem = draw(rng, f"eval-{len(chosen)}")
        if is_eval_content(content(problem)):
            chosen.setdefault(content(problem), problem)
        if len(chosen) == count:
            return list(chosen.values())
    raise ValueError(f"holding out {count} different {described}: found {len(chosen)}; {cure}")
