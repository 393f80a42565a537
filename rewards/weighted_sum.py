"""The reward ``weighted_sum``: several rewards with weights, the breakdown kept."""

import math
from collections.abc import Sequence

from condensegrpo.protocols import Part, Problem, RewardResult
from condensegrpo.trajectory import Trajectory


class WeightedSum:
    """Σ weight · reward. A component is what a part adds to the total: its weight is in it.

    In a configuration each part is a reward by name, with a weight beside it; ``assemble`` builds the parts.

        parts: [{name: correct, weight: 1.0, options: {match: number}}, {name: format, weight: 0.1}]

    The trajectory is well formed if every part says so, and as correct as the part that finds most in it says.
    """

    def __init__(self, *, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)
        names = [part.name for part in self._parts]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a weighted sum of {names or 'nothing'}: wanted at least one part, each name once")

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        results = [RewardResult.of(part.reward(trajectory, problem)) for part in self._parts]
        components = {part.name: part.weight * result.total for part, result in zip(self._parts, results, strict=True)}
        valid = [result.format_valid for result in results if result.format_valid is not None]
        right = [result.correct for result in results if result.correct is not None]
        return RewardResult(
            total=math.fsum(components.values()),
            components=components,
            format_valid=all(valid) if valid else None,
            correct=max(right, default=None),
        )
