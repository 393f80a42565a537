"""Hints that a run prints when it learns nothing, loses many summaries or ignores rewards: why, and which keys help."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from condensegrpo.assembly.learning_signal import turn_reward_estimators
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.trajectory import StopReason

PATIENCE = 3  # steps in a row before a hint
REPEAT = 20  # steps until it is repeated
REJECTED = 0.25  # fraction of rejected summaries from which a step counts
LIMITS: Mapping[StopReason, str] = {  # stops that a key can prevent
    StopReason.TURN_LIMIT: "rollout.limits.max_turns",
    StopReason.CONTEXT_OVERFLOW: "rollout.limits.max_context_tokens",
    StopReason.OUTPUT_LENGTH: "rollout.limits.max_output_tokens",
}


@dataclass(slots=True)
class Streak:
    """Counts the steps in a row in which a condition holds, so that a hint comes neither at once nor at every step."""

    steps: int = field(default=0, init=False)

    def due(self, holds: bool) -> bool:
        """Count one more step; returns whether to print the hint now."""
        self.steps = self.steps + 1 if holds else 0
        return self.steps >= PATIENCE and (self.steps - PATIENCE) % REPEAT == 0


class SignalWatch:
    """Counts the steps from which nothing was learned."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._streak = Streak()

    def hint(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The hint after a step; None while something is learned, or shortly after the last hint."""
        if not self._streak.due(metrics["groups_without_advantage"] >= 1 or metrics.get("rows") == 0):
            return None
        why, *remedies = _diagnosis(self._config, metrics)
        advice = "".join(f"\n  - {remedy}" for remedy in remedies)
        return f"nothing was learned in steps {step - self._streak.steps + 1} to {step}: {why}. What may help:{advice}"


def _diagnosis(config: RunConfig, metrics: Mapping[str, float]) -> Iterator[str]:
    """Why no group has an advantage, then what to change, the likeliest first."""
    samples, success = config.train.samples_per_problem, metrics["success"]
    if metrics["masked"] >= 1:
        yield "every trajectory is masked for its stop (algorithm.stops.handling)"
    elif samples == 1:
        yield "a group of 1 trajectory has nothing to be compared with"
        yield "train.samples_per_problem=8"
        return
    elif success >= 1:
        yield "every trajectory is correct, so all of a group have the same reward"
        yield "harder problems (task.options), or end the run here"
        if config.estimator != "efficient":
            yield "algorithm.advantage.estimator=efficient, which also prefers shorter contexts of correct trajectories"
        return
    elif success == 0:
        yield "no trajectory is correct, so all of a group have the same reward"
    else:
        yield f"within every group all rewards are equal (success is {success:.2f})"
        yield f"a larger train.samples_per_problem (it is {samples}), or a higher rollout.temperature"
        yield "algorithm.resample_rounds=2, which samples other problems until groups differ"
        yield "a reward of more than two values (reward.name=weighted_sum)"
        return
    for stop, key in LIMITS.items():
        if (fraction := metrics.get(f"stop/{stop}", 0.0)) >= 0.25:
            yield f"a larger {key}: {fraction:.0%} of the trajectories stop there ({stop})"
    if metrics["format_valid"] < 0.5:
        yield f"a longer warm start (warm_start.steps): only {metrics['format_valid']:.0%} have a valid format"
    yield f"easier problems (task.options), or a larger train.samples_per_problem (it is {samples})"
    yield "a reward that also pays for parts of the way (reward.name=weighted_sum)"
    yield "`condensegrpo inspect RUN` shows what the policy does"


class SummaryWatch:
    """Counts the steps in which many summaries were rejected."""

    def __init__(self, condenser: str) -> None:
        self._condenser = condenser
        self._streak = Streak()

    def hint(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The hint after a step; None while most summaries can be used, or shortly after the last hint."""
        rejected = metrics.get("summaries_rejected", 0.0)
        fraction = rejected / written if (written := rejected + metrics.get("summaries", 0.0)) else 0.0
        if not self._streak.due(fraction >= REJECTED):
            return None
        return (
            f"{fraction:.0%} of the summaries in step {step} cannot be used. They train nothing, so training does not "
            f"unlearn them, and old results are masked instead. What may help:"
            f"\n  - `condensegrpo inspect RUN`, which shows them and why they were rejected"
            f"\n  - a larger max_tokens of the condenser {self._condenser}, if they are cut off"
            f"\n  - demonstrations of what the condenser shows when it asks for a summary (warm_start.steps)"
            f"\n  - a lower learner.optimiser.lr, if the fraction has grown in training"
        )


class TurnRewardWatch:
    """Notices that turn rewards are paid which the estimator does not use; says so once."""

    def __init__(self, estimator: str, *, used: bool) -> None:
        self._estimator, self._silent = estimator, used

    def hint(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The hint after a step; None if it was given, or if the estimator uses what is paid."""
        if self._silent or "turn_reward" not in metrics:
            return None
        self._silent = True
        able = turn_reward_estimators()
        return f"turn rewards are only logged: the estimator {self._estimator} does not see them; {able} do"
