"""Rewards of the outcome: whether the answer is right, what the environment pays, whether tool calls worked."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from condensegrpo.core.protocols.reward import RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.matches import Match, folded_aliases
from condensegrpo.rewards.verdict import Judgement, JudgingReward, judge_trajectory


@dataclass(kw_only=True, eq=False)
class Correct(JudgingReward):
    """1 for a right answer in a well-formed trajectory, else 0."""

    match: Match = "exact"

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        verdict = judge_trajectory(trajectory, problem, self._matcher)
        return verdict.pays("correct", verdict.correct)


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
        return verdict.pays("answered", answer_worth if verdict.format_valid else 0.0)


class ExactMatch:
    """1 if the answer equals an alias in lower case, white space around it left out, else 0. It judges correctness."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        said = _answer(trajectory)
        right = float(said is not None and said in folded_aliases(problem))
        return RewardResult(total=right, components={"exact_match": right}, correct=right)


class AnswerContains:
    """1 if the answer contains any alias, case ignored, else 0. It does not judge correctness."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        said = _answer(trajectory)
        contained = float(said is not None and any(alias in said for alias in folded_aliases(problem)))
        return RewardResult(total=contained, components={"answer_contains": contained})


def _answer(trajectory: Trajectory) -> str | None:
    answered = trajectory.stop.gives_answer and trajectory.answer is not None
    return str(trajectory.answer).lower().strip() if answered else None


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
        return verdict.pays("environment", total)


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
        return judge_trajectory(trajectory, problem, self._matcher).pays("tool_calls", total)
