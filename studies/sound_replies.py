"""A turn reward for the task ``stories``, which knows what a single reply should say.

{name: studies/sound_replies.py:SoundReplies} among the parts of a weighted sum
"""

from condensegrpo.core.protocols.reward import TurnReward
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.studies.tasks.stories import Stories


class SoundReplies(TurnReward):
    """1 for a reply that says what its own context does, else 0: a turn reward.

    A note after a wrong one is sound if it says the same; a note that says nothing of people is not. Under the
    estimator ``fold_grpo`` with a weight of 1 a failure then pushes down the turns that caused it, and no others.
    """

    def turn_rewards(self, trajectory: Trajectory, problem: Problem) -> tuple[float, ...]:
        """One number a turn."""
        task = Stories()
        return tuple(float(task.sound(tuple(turn.context), turn.reply.text) is True) for turn in trajectory.turns)
