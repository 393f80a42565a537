"""How often the 95 % intervals of a study contain the truth, by simulation: prints the table of docs/how-to/studies.md.

    python docs/scripts/coverage.py          some seconds

A seed's chance of success is drawn from a distribution; one problem in ten is solved half as often. Arms that
share warm starts have a part of each seed's chance in common. A test compares table and page.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from condensegrpo.metrics.intervals import Interval
from condensegrpo.studies.lab.intervals import difference_interval, mean_interval, new_seed_interval

SEEDS = (2, 5, 10, 20)
PROBLEMS = 128
STUDIES = 400  # simulated for each cell: the standard error of a coverage of 0.95 is 0.011
Chances = NDArray[np.float64]


def normal(rng: Generator, seeds: int) -> Chances:
    """0.80 ± 0.06."""
    return rng.normal(0.8, 0.06, seeds)


def collapses(rng: Generator, seeds: int) -> Chances:
    """0.85 ± 0.03, and 0.20 for one seed in five."""
    return np.where(rng.random(seeds) < 0.2, 0.2, rng.normal(0.85, 0.03, seeds))


class Seeds(NamedTuple):
    """What the seeds of the simulated arm are like."""

    name: str
    draw: Callable[[Generator, int], Chances]
    mean: float  # of a seed's chance
    hard: float  # factor of a chance on the hard problems
    common: float  # standard deviation of what the two arms of a seed share


DISTRIBUTIONS = (
    Seeds("normal, 0.80 ± 0.06", normal, 0.8, 0.5, 0.05),
    Seeds("one seed in five collapses", collapses, 0.8 * 0.85 + 0.2 * 0.2, 0.5, 0.05),
)


def main() -> None:
    """Print the table."""
    print(table(), end="")


def table() -> str:
    """A row for each distribution and interval, a column for each number of seeds."""
    lines = [f"| success of a seed | interval | {' | '.join(f'{seeds} seeds' for seeds in SEEDS)} |"]
    lines += ["| --- " * (2 + len(SEEDS)) + "|"]
    for kind in DISTRIBUTIONS:
        columns = [coverage(kind, seeds) for seeds in SEEDS]
        for interval in columns[0]:
            lines.append(
                f"| {kind.name} | {interval} | {' | '.join(f'{column[interval]:.2f}' for column in columns)} |"
            )
    return "\n".join(lines) + "\n"


def coverage(kind: Seeds, seeds: int) -> dict[str, float]:
    """The share of simulated studies whose interval contains the truth, by interval."""
    rng = np.random.default_rng(7)
    hits: dict[str, int] = {}
    for _ in range(STUDIES):
        for name, interval, truth in _study(rng, kind, seeds):
            hits[name] = hits.get(name, 0) + (interval is not None and interval.low <= truth <= interval.high)
    return {name: count / STUDIES for name, count in hits.items()}


def _study(rng: Generator, kind: Seeds, seeds: int) -> Iterator[tuple[str, Interval | None, float]]:
    """The intervals of one study of two arms, each with what it is to contain."""
    factor_P = np.where(rng.random(PROBLEMS) < 0.1, kind.hard, 1.0)
    factor = 0.9 + 0.1 * kind.hard
    chance_S, theirs_S = kind.draw(rng, seeds + 1), rng.normal(0.6, 0.04, seeds)
    cell_SP = _play(rng, chance_S, factor_P)
    yield "mean", mean_interval(cell_SP[:seeds]), kind.mean * factor
    yield "a new seed", new_seed_interval(cell_SP[:seeds]), float(cell_SP[seeds].mean())
    common_S = rng.normal(0, kind.common, seeds)
    ours_SP, theirs_SP = (_play(rng, each + common_S, factor_P) for each in (chance_S[:seeds], theirs_S))
    truth = (kind.mean - 0.6) * factor
    yield "difference, paired", difference_interval(ours_SP, theirs_SP, paired=True), truth
    yield "difference, Welch", difference_interval(ours_SP, theirs_SP, paired=False), truth


def _play(rng: Generator, chance_S: Chances, factor_P: Chances) -> Chances:
    """Which problems each seed solves."""
    return (rng.random((len(chance_S), PROBLEMS)) < chance_S[:, None] * factor_P).astype(np.float64)


if __name__ == "__main__":
    main()
