"""The two judgements that every reward is built on: is the trajectory well formed, is its answer right."""

import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple

from condensegrpo.core.protocols.reward import RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.threads import parsed
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.matches import MAX_CODE, Match, Matcher, code_of
from condensegrpo.sandbox.sandbox import Sandbox

Domain = Literal["general", "math", "coding"]
MAX_VALUE = 300  # characters of an answer in the domain math: a value and no essay


class Judgement(NamedTuple):
    """The judgement of one trajectory."""

    format_valid: bool
    correct: float  # 0.0 or 1.0; 0.0 where the format is invalid

    def pays(self, name: str, total: float) -> RewardResult:
        """The result of a reward that pays ``total``, its only component, and reports this judgement."""
        return RewardResult(total=total, components={name: total}, format_valid=self.format_valid, correct=self.correct)


@dataclass(kw_only=True, eq=False)
class JudgingReward:
    """Options of the rewards that judge whether the answer is right; with ``match`` None, no answer is."""

    match: Match | None = "exact"
    sandbox: Sandbox | None = None

    def __post_init__(self) -> None:
        self._matcher = None if self.match is None else Matcher(self.match, self.sandbox)


def judge_trajectory(
    trajectory: Trajectory,
    problem: Problem,
    matcher: Matcher | None,
    *,
    min_reply_chars: int = 1,
    min_last_reply_chars: int = 1,
    domain: Domain = "general",
) -> Judgement:
    """Both judgements at once; ``matcher=None`` skips the answer, and no answer is right.

    An answer in an invalid format is not compared with the ground truth.
    """
    valid = format_valid(
        trajectory, min_reply_chars=min_reply_chars, min_last_reply_chars=min_last_reply_chars, domain=domain
    )
    if matcher is None:
        return Judgement(valid, 0.0)
    matcher.check_truth(problem)
    return Judgement(valid, correct(trajectory, problem, matcher) if valid else 0.0)


def format_valid(
    trajectory: Trajectory, *, min_reply_chars: int = 1, min_last_reply_chars: int = 1, domain: Domain = "general"
) -> bool:
    """Whether a trajectory ended with an answer and no reply of it is blank; texts for a condenser are no replies.

    In the domain ``math`` the answer is a value of at most 300 characters, in ``coding`` it holds code that Python can
    read.

    Args:
        min_reply_chars: characters that every reply needs, surrounding whitespace not counted.
        min_last_reply_chars: characters that the last one needs.
    """
    lengths = [len(turn.reply.text.strip()) for turn in trajectory.turns if turn.kind == "act"]
    if not trajectory.stop.gives_answer or trajectory.answer is None or not lengths:
        return False
    if min(lengths) < min_reply_chars or lengths[-1] < min_last_reply_chars:
        return False
    if domain == "math":
        return len(trajectory.answer) <= MAX_VALUE
    return domain == "general" or _is_python(code_of(trajectory.answer))


def correct(trajectory: Trajectory, problem: Problem, matcher: Matcher) -> float:
    """1.0 if the answer is right, 0.0 if it is wrong or missing; see ``Matcher``."""
    matcher.check_truth(problem)
    return 0.0 if trajectory.answer is None else float(matcher.right(trajectory.answer, problem))


def _is_python(code: str) -> bool:
    if not code.strip() or len(code) > MAX_CODE:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
