"""The figures of an evaluation: counted in trajectories, clustered by problem. Pure functions."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from condensegrpo.config.load import HELD_OUT
from condensegrpo.core.evaluation import Evaluation
from condensegrpo.metrics.estimates import mean_interval_by_problem, pass_at_k
from condensegrpo.metrics.information import mean_curve
from condensegrpo.metrics.trajectories import TrajectoryFacts, summarise


def evaluation(
    name: str, facts: Sequence[TrajectoryFacts], *, seed: int, seconds: float, condensing: float = 0.0
) -> Evaluation:
    """The figures of some trajectories, equally many of each problem, in any order.

    Raises:
        ValueError: nothing was sampled, or problems have different numbers of trajectories.
    """
    correct = [trajectory.score.correct for trajectory in facts]
    owners = [trajectory.problem_id for trajectory in facts]
    counts = Counter(owners)
    if len(set(counts.values())) != 1:
        raise ValueError(f"evaluating {name!r}: wanted equally many trajectories of each problem, found {dict(counts)}")
    samples = next(iter(counts.values()))
    solved = dict.fromkeys(counts, 0)
    for owner, value in zip(owners, correct, strict=True):
        solved[owner] += int(value >= 1)
    mean, low, high = mean_interval_by_problem(correct, owners)
    information = mean_curve([trajectory.information for trajectory in facts])
    return Evaluation(
        name=name,
        problems=len(solved),
        samples=samples,
        seed=seed,
        success=mean,
        success_low=None if low is None else max(low, 0.0),
        success_high=None if high is None else min(high, 1.0),
        pass_at={
            k: fmean(pass_at_k(successes, samples, k) for successes in solved.values())
            for k in (1 << power for power in range(samples.bit_length()))
        },
        metrics=summarise(facts),
        information=information if any(value is not None for value in information) else (),
        seconds=seconds,
        condensing=condensing,
    )


def flat(result: Evaluation) -> dict[str, float]:
    """An evaluation as metrics: ``eval/success``, or ``eval/<variant>/success`` for a variant."""
    place = "eval" if result.name == HELD_OUT else f"eval/{result.name}"
    bounds = {"success_low": result.success_low, "success_high": result.success_high}
    return {
        **{f"{place}/{key}": value for key, value in result.metrics.items()},
        **{f"{place}/{key}": value for key, value in bounds.items() if value is not None},
        f"{place}/success": result.success,
        f"{place}/seconds": result.seconds,
    }
