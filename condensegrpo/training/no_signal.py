"""Notices that a run learns nothing, because no group has an advantage, and says why and which keys help."""

from collections.abc import Iterator, Mapping

from condensegrpo.config.schema import RunConfig
from condensegrpo.core.trajectory import Stop
from condensegrpo.training.streak import Streak

LIMITS: Mapping[Stop, str] = {  # stops that a key can prevent
    Stop.TURN_LIMIT: "rollout.limits.max_turns",
    Stop.CONTEXT_OVERFLOW: "rollout.limits.max_context_tokens",
    Stop.OUTPUT_LENGTH: "rollout.limits.max_output_tokens",
}


class SignalWatch:
    """Counts the steps from which nothing was learned."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._barren = Streak()

    def hint(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """What to say after a step: None while something is learned, or shortly after the last hint."""
        nothing = metrics["groups_without_advantage"] >= 1 or metrics.get("rows") == 0
        if not self._barren.due(nothing):
            return None
        why, *remedies = _diagnosis(self._config, metrics)
        advice = "".join(f"\n  - {remedy}" for remedy in remedies)
        return f"nothing was learned in steps {step - self._barren.steps + 1} to {step}: {why}. What may help:{advice}"


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
        if (share := metrics.get(f"stop/{stop}", 0.0)) >= 0.25:
            yield f"a larger {key}: {share:.0%} of the trajectories stop there ({stop})"
    if metrics["format_valid"] < 0.5:
        yield f"a longer warm start (warm_start.steps): only {metrics['format_valid']:.0%} have a valid format"
    yield f"easier problems (task.options), or a larger train.samples_per_problem (it is {samples})"
    yield "a reward that also pays for parts of the way (reward.name=weighted_sum)"
    yield "`condensegrpo inspect RUN` shows what the policy does"
