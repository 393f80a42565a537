"""The rewards ``exact_match`` and ``answer_contains``: an answer against the aliases of the ground truth."""

from condensegrpo.core.protocols import Problem, RewardResult
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.matches import folded_aliases


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
