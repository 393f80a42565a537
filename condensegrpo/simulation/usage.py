"""What servers are busy with, and what they wait for, in virtual seconds."""

from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum


class State(StrEnum):
    """What a server does, or why it has nothing to do."""

    BUSY = "busy"  # at least one request is under way
    TOOLS = "tools"  # its trajectories are at their tools, or wait for the rollout engine
    TAIL = "tail"  # its trajectories have ended, those of other servers have not
    LEARNER = "learner"  # no batch may be sampled before the learner has taken a step
    WEIGHTS = "weights"  # new weights are loaded
    LOST = "lost"  # it does not answer


class ServerUsage:
    """The seconds of one server by state."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since = now()
        self.state = State.LEARNER
        self.seconds: defaultdict[State, float] = defaultdict(float)

    def enter(self, state: State) -> None:
        """A state begins; the seconds since the last call belong to the former one."""
        now = self._now()
        self.seconds[self.state] += now - self._since
        self.state, self._since = state, now
