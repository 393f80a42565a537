"""Rewards of the outcome, and the two judgements that rewards are built on: well formed, and right.

``correct``, ``answered``, ``exact_match`` and ``answer_contains`` pay the answer, ``environment`` what the environment
paid, ``tool_calls`` whether tool calls worked.
"""

import warnings
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge

from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.reward import RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.threads import parsed
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.matches import MAX_CODE, Match, Matcher, aliases_in_lower_case, code_of
from condensegrpo.sandbox.sandbox import Sandbox

Domain = Literal["general", "math", "coding"]
MAX_VALUE = 300  # characters of an answer in the domain math: a value and no essay


class Judgement(NamedTuple):
    """The judgement of one trajectory."""

    format_valid: bool
    correct: float  # 0.0 or 1.0; 0.0 where the format is invalid

    def result(self, name: str, total: float) -> RewardResult:
        """The result of a reward that pays ``total``, its only component, and reports this judgement."""
        return RewardResult(total=total, components={name: total}, format_valid=self.format_valid, correct=self.correct)


@dataclass(kw_only=True, eq=False)
class JudgingReward:
    """Options of the rewards that judge whether the answer is right; with ``match`` None, no answer is."""

    match: Match | None = "exact"
    sandbox: Sandbox | None = None

    def __post_init__(self) -> None:
        self._matcher = None if self.match is None else Matcher(self.match, self.sandbox)

    def check_problem(self, problem: Problem) -> None:
        """Raise ValueError for a problem without a ground truth that can be right."""
        if self._matcher is not None:
            self._matcher.check_problem(problem)


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
    answer = trajectory.answer if valid else None
    return Judgement(valid, 0.0 if answer is None else float(matcher.is_right(answer, problem)))


def format_valid(
    trajectory: Trajectory, *, min_reply_chars: int = 1, min_last_reply_chars: int = 1, domain: Domain = "general"
) -> bool:
    """Whether a trajectory ended with an answer and no reply of it is blank; texts for a condenser are no replies.

    A reply that holds a call and no text is not blank: families of models write calls apart from the text.

    In the domain ``math`` the answer is a value of at most 300 characters, in ``coding`` it holds code that Python can
    read.

    Args:
        min_reply_chars: characters that every reply needs, surrounding whitespace not counted.
        min_last_reply_chars: characters that the last one needs.
    """
    lengths = [_characters(turn.reply) for turn in trajectory.turns if turn.kind == "act"]
    if not trajectory.stop.gives_answer or trajectory.answer is None or not lengths:
        return False
    if min(lengths) < min_reply_chars or lengths[-1] < min_last_reply_chars:
        return False
    if domain == "math":
        return len(trajectory.answer) <= MAX_VALUE
    return domain == "general" or _is_python(code_of(trajectory.answer))


def _characters(reply: Message) -> int:
    calls = (len(call.name) + len(call.arguments) for call in reply.tool_calls)
    return len(reply.text.strip()) or sum(calls)


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


@dataclass(kw_only=True, eq=False)
class Correct(JudgingReward):
    """1 for a right answer in a well-formed trajectory, else 0."""

    match: Match = "exact"

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        verdict = judge_trajectory(trajectory, problem, self._matcher)
        return verdict.result("correct", verdict.correct)


@dataclass(kw_only=True, eq=False)
class Answered(JudgingReward):
    """``right`` for a right answer, ``wrong`` for another one, 0 without an answer or with a blank reply."""

    right: float = 1.0
    wrong: float = 0.1
    match: Match = "number"

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        verdict = judge_trajectory(trajectory, problem, self._matcher)
        answer_worth = self.right if verdict.correct else self.wrong
        return verdict.result("answered", answer_worth if verdict.format_valid else 0.0)


class _AgainstAliases:
    def check_problem(self, problem: Problem) -> None:
        """Raise ValueError for a problem without ground truth."""
        aliases_in_lower_case(problem)

    def _answer(self, trajectory: Trajectory) -> str | None:
        answered = trajectory.stop.gives_answer and trajectory.answer is not None
        return str(trajectory.answer).lower().strip() if answered else None


class ExactMatch(_AgainstAliases):
    """1 if the answer equals an alias in lower case, white space around it left out, else 0. It judges correctness."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        answer = self._answer(trajectory)
        right = float(answer is not None and answer in aliases_in_lower_case(problem))
        return RewardResult(total=right, components={"exact_match": right}, correct=right)


class AnswerContains(_AgainstAliases):
    """1 if the answer contains any alias, case ignored, else 0.

    Used alone, an answer that contains one is correct; in ``weighted_sum`` it leaves the judgement to the other parts.
    """

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        answer = self._answer(trajectory)
        contained = float(answer is not None and any(alias in answer for alias in aliases_in_lower_case(problem)))
        return RewardResult(total=contained, components={"answer_contains": contained})


@dataclass(kw_only=True, eq=False)
class EnvironmentOutcome:
    """The outcome with which the environment ended the episode, or ``missing`` where it did not.

    An episode without an outcome ran into a limit, failed, or was ended by an answer that nobody judged. It is correct
    if the outcome is at least 1, and well formed if there is one.
    """

    missing: float = 0.0

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        outcome = trajectory.outcome
        total = self.missing if outcome is None else outcome
        verdict = Judgement(format_valid=outcome is not None, correct=float(outcome is not None and outcome >= 1))
        return verdict.result("environment", total)


@dataclass(kw_only=True, eq=False)
class ToolCalls(JudgingReward):
    """``weight`` times successes/attempts over all turns; 0 for a trajectory that called no tool.

    Whether the answer is right is reported, not paid; a problem without ground truth is then an error, unless
    ``match`` is None.
    """

    weight: Annotated[float, Ge(0)] = 1.0

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        attempts = sum(turn.tool_attempts for turn in trajectory.turns)
        successes = sum(turn.tool_successes for turn in trajectory.turns)
        total = self.weight * successes / attempts if attempts else 0.0
        return judge_trajectory(trajectory, problem, self._matcher).result("tool_calls", total)
