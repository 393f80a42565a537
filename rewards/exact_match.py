"""The rewards ``exact_match`` and ``answer_contains``: an answer against the aliases of the ground truth."""

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.matches import check_truth


class ExactMatch:
    """1 if the answer equals an alias in lower case, white space around it left out, else 0. That is what is right."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        said = _answer(trajectory)
        right = float(said is not None and said in _aliases(problem))
        return RewardResult(total=right, components={"exact_match": right}, correct=right)


class AnswerContains:
    """1 if the answer contains any alias, case ignored, else 0. It does not judge correctness."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        said = _answer(trajectory)
        found = float(said is not None and any(alias in said for alias in _aliases(problem)))
        return RewardResult(total=found, components={"answer_contains": found})


def _answer(trajectory: Trajectory) -> str | None:
    answered = trajectory.stop.gives_answer and trajectory.answer is not None
    return str(trajectory.answer).lower().strip() if answered else None


def _aliases(problem: Problem) -> frozenset[str]:
    """The forms of the ground truth in lower case.

    Raises:
        ValueError: there is none.
    """
    check_truth(problem, "alias")
    named = (problem.answer or "", *map(str, problem.data.get("aliases", ())))
    return frozenset(alias.lower().strip() for alias in named if alias.strip())
