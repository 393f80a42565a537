"""Plays groups of a batch with one set of components: here, in this process; in ``workers/``, in others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from condensegrpo.core.protocols.condenser import Counted
from condensegrpo.core.protocols.environment import Environment
from condensegrpo.core.protocols.reward import GroupReward, Reward
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.episodes.collect import OnScored, collect
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.group import ProblemGroup

COUNT_SECONDS = 10.0  # that a condenser may take to return its counts


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlayer:
    """Plays in this process."""

    environment: Callable[[Problem], Environment]
    engine: Engine
    reward: Reward | GroupReward

    async def play(
        self, batch: Sequence[ProblemGroup], *, samples: int, run_seed: int, step: int, on_scored: OnScored
    ) -> tuple[ScoredTrajectory, ...]:
        """``samples`` scored trajectories of every group of a batch; see ``collect``."""
        return await collect(
            batch,
            samples=samples,
            environment=self.environment,
            engine=self.engine.at_step(step),
            reward=self.reward,
            run_seed=run_seed,
            step=step,
            on_scored=on_scored,
        )

    def counts(self) -> Mapping[str, float]:
        """What the condenser counted since the last call."""
        condenser = self.engine.condenser
        given = condenser.counts() if isinstance(condenser, Counted) else {}
        return {str(name): float(value) for name, value in given.items()}

    @property
    def condensing_seconds(self) -> float:
        """Seconds that the condenser was at work, see ``Stopwatch``."""
        return self.engine.stopwatch.seconds
