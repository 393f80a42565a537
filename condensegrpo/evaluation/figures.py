"""The figures of an evaluation: counted in trajectories, clustered by problem. Pure functions."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from condensegrpo.config.load import HELD_OUT
from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.scored_trajectory import TrajectoryFigures, mean_curve
from condensegrpo.metrics.estimates import pass_at_k, success_interval
from condensegrpo.metrics.trajectories import summarise


def evaluation_of(
    name: str, figures: Sequence[TrajectoryFigures], *, seed: int, seconds: float, condensing: float = 0.0
) -> Evaluation:
    """The figures of some trajectories, equally many of each problem, in any order.

    Raises:
        ValueError: nothing was sampled, or problems have different numbers of trajectories.
    """
    correct: dict[str, list[float]] = defaultdict(list)
    for trajectory in figures:
        correct[trajectory.group_id].append(trajectory.correct)  # two problems may have one id
    counts = {problem: len(values) for problem, values in correct.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"evaluating {name!r}: wanted equally many trajectories of each problem, found {counts}")
    samples = next(iter(counts.values()))
    solved = [sum(value >= 1 for value in values) for values in correct.values()]
    mean, low, high = success_interval(correct)
    information = mean_curve([trajectory.information for trajectory in figures])
    return Evaluation(
        name=name,
        problems=len(solved),
        samples=samples,
        seed=seed,
        success=mean,
        success_low=low,
        success_high=high,
        pass_at={
            k: fmean(pass_at_k(successes, samples, k) for successes in solved)
            for k in (1 << power for power in range(samples.bit_length()))
        },
        metrics=summarise(figures),
        information=information if any(value is not None for value in information) else (),
        seconds=seconds,
        condensing=condensing,
    )


def evaluation_metrics(result: Evaluation) -> dict[str, float]:
    """An evaluation as metrics: ``eval/success``, or ``eval/<variant>/success`` for a variant."""
    prefix = metric_prefix(result.name)
    return {f"{prefix}/{key}": value for key, value in result.figures().items()}


def metric_prefix(evaluation: str) -> str:
    """What the metrics of an evaluation begin with: ``eval``, or ``eval/<variant>``."""
    return "eval" if evaluation == HELD_OUT else f"eval/{evaluation}"


def metrics_of(evaluation: str, line: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an evaluation in a line of a run's metrics, without their prefix."""
    prefix = f"{metric_prefix(evaluation)}/"
    return {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}


def evaluations_in(metrics: Iterable[str]) -> dict[str, str]:
    """The evaluations whose success is among some metrics, each with its ``metric_prefix``.

    ``eval/reward/success`` alone is a part of the reward; a variant of the name has an interval of its success, too.
    """
    known = dict.fromkeys(metrics)
    prefixes = [key.removesuffix("/success") for key in known if key.startswith("eval/") and key.endswith("/success")]
    parts = {each for each in prefixes if each.endswith("/reward") and f"{each}/success_low" not in known}
    of_evaluations = (prefix for prefix in prefixes if prefix not in parts)
    return {HELD_OUT if prefix == "eval" else prefix.removeprefix("eval/"): prefix for prefix in of_evaluations}
