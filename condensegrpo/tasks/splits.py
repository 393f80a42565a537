"""Keeps training and evaluation apart: no question is in both."""

import hashlib
from collections.abc import Sequence

from condensegrpo.core.protocols import Problem


def fold(question: str) -> str:
    """A question without the differences that do not make it another one: case and whitespace."""
    return " ".join(question.casefold().split())


def without(problems: Sequence[Problem], held_out: Sequence[Problem]) -> tuple[Problem, ...]:
    """The problems whose question is not held out."""
    questions = {fold(problem.question) for problem in held_out}
    return tuple(problem for problem in problems if fold(problem.question) not in questions)


def is_held_out(question: str, *, share: float) -> bool:
    """Whether a question belongs to the evaluation; depends on the question alone.

    Args:
        share: of all questions, in [0, 1].
    """
    digest = hashlib.blake2b(fold(question).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
