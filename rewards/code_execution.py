"""The turn reward ``code_execution``: every turn is paid for its calls whose result is good."""

from typing import Annotated

from annotated_types import Ge

from condensegrpo.core.protocols import Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.rewards.tool_results import good_calls, valid_calls


class CodeExecution:
    """share·(good calls of this turn)/(valid calls of the trajectory) + each·(good calls of this turn): a turn reward.

    A call is valid if it could be read, and good if its result is not blank and holds none of ``Error:``, ``Traceback``
    or a time-out. Summed over the turns that is share·good/valid + each·good; all 0 without a valid call.

        valid 1, 0, 1; good 1, 0, 0; share 0.3, each 0.05   ─▶   0.2, 0, 0
    """

    def __init__(self, *, share: Annotated[float, Ge(0)] = 0.3, each: Annotated[float, Ge(0)] = 0.05) -> None:
        self._share = share
        self._each = each

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> tuple[float, ...]:
        """One number a turn."""
        valid = sum(map(valid_calls, trajectory.turns))
        good_K = map(good_calls, trajectory.turns)
        return tuple(self._share * good / valid + self._each * good if valid else 0.0 for good in good_K)
