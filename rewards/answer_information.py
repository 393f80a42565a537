"""The turn reward ``answer_information``: what a turn added to what the context knows of the answer."""

from collections.abc import Sequence
from typing import Annotated

from annotated_types import Gt

from condensegrpo.core.protocols import Problem
from condensegrpo.core.trajectory import Trajectory


class AnswerInformation:
    """The gain of information about the ground truth from a turn's context to the next one's, bounded.

        r_t = min(max(I_(t+1) − I_t, −bound), bound),   I_t = log π(ground truth | c_t) in nats

    The last turn has no context after it and gets 0. A turn whose context was not measured (one that writes a summary)
    lies between two measured turns: it precedes the next context, so it gets the gain. Unbounded gains add up to
    I of the last context less I of the first, whatever happened between.

        I −9.0 −4.0 −4.5  ─▶  5.0 −0.5 0
    """

    def __init__(self, *, bound: Annotated[float, Gt(0)] = 10.0) -> None:
        self._bound = bound

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> Sequence[float]:
        """One number a turn.

        Raises:
            ValueError: no turn was measured.
        """
        measured = [turn.answer_logprob for turn in trajectory.turns]
        if measured and all(value is None for value in measured):
            raise ValueError(
                f"no turn says what its context knows of the answer: set rollout.answer_form, such as "
                f"'<answer>{{answer}}</answer>'; the ground truth is {problem.answer!r}"
            )
        paid, last = [0.0] * len(measured), None
        for turn, value in enumerate(measured):
            if value is not None and last is not None:
                paid[turn - 1] = min(max(value - last, -self._bound), self._bound)
            last = last if value is None else value
        return paid
