"""Keeps training and evaluation apart: no question is in both."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from condensegrpo.core.errors import DataError
from condensegrpo.core.protocols.task import Problem, Split

SHARE = 0.1  # of the questions, held out where there is no evaluation data


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Problems for training and for evaluation."""

    train: tuple[Problem, ...]  # at least one
    held_out: tuple[Problem, ...]
    left_out: int  # training problems left out because the evaluation data has their question

    def mapped(self, change: Callable[[Problem], Problem]) -> Self:
        """The splits with every problem changed."""
        return replace(self, train=tuple(map(change, self.train)), held_out=tuple(map(change, self.held_out)))


class SplitTask:
    """A task with the problems of two splits. Subclasses make the splits."""

    _splits: Splits

    @property
    def left_out(self) -> int:
        """Training problems that are left out because the evaluation data has their question."""
        return self._splits.left_out

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of a split, in the order of the data."""
        return self._splits.train if split == "train" else self._splits.held_out


def split(
    train: Sequence[Problem],
    held_out: Sequence[Problem] | None,
    *,
    source: str,
    share: float = SHARE,
    identity: Callable[[Problem], str] = lambda problem: problem.question,
) -> Splits:
    """The training problems whose question is not held out, and the evaluation problems.

    Args:
        identity: what makes two problems of one question the same; it may take long.
        held_out: the evaluation problems; None: those of ``train`` whose hash falls into ``share``.
        source: where the training problems are from, for the error.
    """
    if held_out is None:
        named = [(problem, is_held_out(identity(problem), share=share)) for problem in train]
        chosen = [problem for problem, held in named if held]
        kept = tuple(problem for problem, held in named if not held)
    else:
        chosen, asked = list(held_out), {fold(problem.question) for problem in held_out}
        shared = asked & {fold(problem.question) for problem in train}
        held_back = {fold(identity(problem)) for problem in chosen if fold(problem.question) in shared}
        kept = tuple(
            problem
            for problem in train
            if fold(problem.question) not in shared or fold(identity(problem)) not in held_back
        )
    if not kept:
        raise DataError(
            f"splitting {source}: all {len(train)} questions are held out for evaluation, none is left to train on. "
            f"Give other eval_data{' or lower eval_share' if held_out is None else ''}"
        )
    return Splits(train=kept, held_out=tuple(chosen), left_out=0 if held_out is None else len(train) - len(kept))


def fold(question: str) -> str:
    """A question without the differences that do not make it another one: case and whitespace."""
    return " ".join(question.casefold().split())


def is_held_out(question: str, *, share: float) -> bool:
    """Whether a question belongs to the evaluation; depends on the question alone.

    Args:
        share: of all questions, in [0, 1].
    """
    digest = hashlib.blake2b(fold(question).encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
