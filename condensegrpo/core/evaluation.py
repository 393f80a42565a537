"""The result of an evaluation, as every part of the package passes it on. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The figures of a policy on some problems."""

    name: str  # config.load.HELD_OUT, or the name of a variant
    problems: int
    samples: int  # trajectories a problem
    seed: int
    success: float  # mean of Score.correct over trajectories
    success_low: float  # 95 % interval in [0, 1], clustered by problem
    success_high: float
    pass_at: Mapping[int, float]  # k → unbiased pass@k
    metrics: Mapping[str, float]  # of metrics.trajectories.summarise
    information: tuple[float | None, ...]  # nats, by turn: the mean of log π(ground truth | c_t); (): not measured
    seconds: float
    condensing: float = 0.0  # of these seconds, those in which at least one episode was at its condenser

    def figures(self) -> dict[str, float]:
        """Its metrics with the success and its interval."""
        return {
            **self.metrics,
            "success": self.success,
            "success_low": self.success_low,
            "success_high": self.success_high,
            "seconds": self.seconds,
        }
