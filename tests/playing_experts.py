"""The turns of a task's expert, played through the engine: no policy is asked."""

from itertools import islice
from typing import Any

from talk import agent, engine

from condensegrpo.assembly.demonstrations import DemonstratedTurn, Demonstrations


def silent(prompt: str) -> str:
    raise AssertionError(f"the sampler was called with {prompt!r}")


def played(task: Any, **parts: Any) -> Demonstrations:
    """The demonstrations of a task with an expert; ``parts`` are of the engine."""
    return Demonstrations(task=task, problems=task.problems, engine=engine(agent(silent), **parts))


def turns(task: Any, count: int, *, seed: int = 0, skipped: int = 0, **parts: Any) -> list[DemonstratedTurn]:
    """The first of them."""
    return list(islice(played(task, **parts).turns(seed, skipped=skipped), count))
