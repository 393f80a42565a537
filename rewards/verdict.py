"""The two judgements that every reward is built on: is the trajectory well formed, is its answer right."""

import re
from typing import Literal, NamedTuple

from condensegrpo.protocols import Problem
from condensegrpo.trajectory import Stop, Trajectory

Match = Literal["exact", "number", "alias"]
MATCHES: tuple[Match, ...] = ("exact", "number", "alias")

_DECORATION = re.compile(r"[,$%]")
_MINUS = "\N{MINUS SIGN}"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_TOLERANCE = 1e-6


class Verdict(NamedTuple):
    """The judgement of one trajectory."""

    format_valid: bool
    correct: float  # 0.0 or 1.0; 0.0 where the format is invalid


def judge(trajectory: Trajectory, problem: Problem, *, match: Match | None, min_reply_chars: int = 1) -> Verdict:
    """Both judgements at once; ``match=None`` leaves the answer unread and calls nothing right.

    Raises:
        ValueError: the answer is to be read and the problem has no ground truth.
    """
    valid = format_valid(trajectory, min_reply_chars=min_reply_chars)
    right = 0.0 if match is None else correct(trajectory, problem, match=match)
    return Verdict(valid, right if valid else 0.0)


def format_valid(trajectory: Trajectory, *, min_reply_chars: int = 1) -> bool:
    """Whether a trajectory ended with an answer and no reply of it is blank.

    Args:
        min_reply_chars: characters that every reply needs, surrounding whitespace not counted.
    """
    lengths = [len(turn.reply.content.strip()) for turn in trajectory.turns]
    return trajectory.stop is Stop.ANSWERED and bool(lengths) and min(lengths) >= min_reply_chars


def correct(trajectory: Trajectory, problem: Problem, *, match: Match) -> float:
    """1.0 if the answer is the ground truth, 0.0 if it is not or none was given.

    ``exact`` folds case and whitespace; ``number`` compares values, see there; ``alias`` is ``exact`` for any of
    ``problem.data["aliases"]`` or the ground truth.

    Raises:
        ValueError: the problem has no ground truth: nothing is ever guessed from the look of an answer.
    """
    truths = _truths(problem, match)
    if trajectory.answer is None:
        return 0.0
    if match != "number":
        return float(_fold(trajectory.answer) in {_fold(truth) for truth in truths})
    wanted = number(truths[0])
    if wanted is None:
        raise ValueError(f"judging problem {problem.id} by number: its ground truth {truths[0]!r} is not a number")
    found = number(trajectory.answer)
    return float(found is not None and abs(found - wanted) < _TOLERANCE)


def number(text: str) -> float | None:
    """The value of a text that is one number after ``, $ %`` are removed; ``None`` if it is anything else.

    White space may surround the number and never stands in it: "7 2" are two numbers.

    >>> number("$1,080"), number("3.14"), number("\u22125"), number("7 2"), number("12 apples")
    (1080.0, 3.14, -5.0, None, None)
    """
    bare = _DECORATION.sub("", text).strip().replace(_MINUS, "-")
    return float(bare) if _NUMBER.fullmatch(bare) else None


def check_match(match: str) -> None:
    """Raise ValueError unless ``match`` is one of ``MATCHES``."""
    if match not in MATCHES:
        raise ValueError(f"match={match!r}: wanted one of {', '.join(MATCHES)}")


def _truths(problem: Problem, match: Match) -> tuple[str, ...]:
    answer = () if problem.answer is None else (problem.answer,)
    aliases = tuple(str(alias) for alias in problem.data.get("aliases", ())) if match == "alias" else ()
    if not answer and not aliases:
        raise ValueError(
            f"judging problem {problem.id}: it has no ground truth, so no answer can be called right. "
            f"Give it an answer (the task's answer column), or use a reward that needs none"
        )
    return (*answer, *aliases)


def _fold(text: str) -> str:
    return " ".join(text.casefold().split())
