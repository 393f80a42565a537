"""The turn reward ``answer_in_results``: whether the first tool result holds the answer."""

from condensegrpo.core.protocols import Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.matches import folded_aliases
from condensegrpo.rewards.tool_results import results_of


class AnswerInResults:
    """1 for the turn with the first tool result if it contains any alias of the answer, case ignored: a turn reward.

    results "Error: …" in turn 0, "… Paris …" in turn 2; answer Paris   ─▶   0, 0, 0
    """

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> tuple[float, ...]:
        """One number a turn.

        Raises:
            ValueError: the problem has no ground truth.
        """
        aliases = folded_aliases(problem)
        paid_K = [0.0] * len(trajectory.turns)
        for at, turn in enumerate(trajectory.turns):
            results = results_of(turn)
            if results:
                paid_K[at] = float(any(alias in results[0].lower() for alias in aliases))
                break
        return tuple(paid_K)
