"""The reward ``weighted_sum``: several rewards with weights, the breakdown kept."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import SupportsFloat

from condensegrpo.core.defaults import with_defaults
from condensegrpo.core.failures import at_definition
from condensegrpo.core.protocols.reward import RewardPart, RewardResult, TurnReward
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory


class WeightedSum:
    """Σ weight · reward, outcome and turns apart. A component is the addend of a part: its weight is in it.

    In a configuration each part is a reward by name, with a weight beside it; ``assembly`` builds the parts.

        parts: [{name: correct, weight: 1.0, options: {match: number}}, {name: tool_execution, weight: 0.2}]

    A part that is a turn reward adds to the turn rewards and nothing to the total; its component is the sum
    over all turns. Right answer, two calls in turn 0 of which one worked, none in turn 1:

        total 1.0   components {correct: 1.0, tool_execution: 0.1}   turn rewards 0.1, 0.0

    The trajectory is well formed if every part says so, and as correct as the part that finds most in it says.
    """

    def __init__(self, *, parts: Sequence[RewardPart]) -> None:
        self.parts = tuple(map(_completed, parts))
        names = [part.name for part in self.parts]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a weighted sum of {names or 'nothing'}: wanted at least one part, each name once")
        if all(isinstance(part.reward, TurnReward) for part in self.parts):
            raise ValueError(
                f"a weighted sum of {names}: all of them pay single turns; add a part that pays the outcome, such as "
                f"correct"
            )

    def __call__(self, trajectory: Trajectory, problem: Problem) -> RewardResult:
        """The reward of one trajectory."""
        results = [_weighted(part, trajectory, problem) for part in self.parts]
        valid = [result.format_valid for result in results if result.format_valid is not None]
        right = [result.correct for result in results if result.correct is not None]
        paying_K = [result.turn_rewards for result in results if result.turn_rewards]
        return RewardResult(
            total=sum(result.total for result in results),  # not fsum, which raises on inf − inf; see RewardResult.of
            components={name: value for result in results for name, value in result.components.items()},
            format_valid=all(valid) if valid else None,
            correct=max(right, default=None),
            turn_rewards=tuple(sum(turn) for turn in zip(*paying_K, strict=True)),
        )


def _completed(part: RewardPart) -> RewardPart:
    """The part; a turn reward that inherits nothing gets the defaults of ``TurnReward``."""
    if not hasattr(part.reward, "turn_rewards"):
        return part
    return replace(part, reward=with_defaults(part.reward, TurnReward))


def _weighted(part: RewardPart, trajectory: Trajectory, problem: Problem) -> RewardResult:
    """The result of one part, times its weight."""
    at = partial(at_definition, part.reward)
    pays_turns, turns = isinstance(part.reward, TurnReward), len(trajectory.turns)
    if isinstance(part.reward, TurnReward):
        paid_K = part.reward.turn_rewards(trajectory, problem)
        if not isinstance(paid_K, Sequence):
            raise TypeError(
                f"the part {part.name} returned {paid_K!r:.80}, wanted a number for each turn, as in "
                f"return [1.0, 0.0]{at()}"
            )
        if wrong := [value for value in paid_K if not isinstance(value, SupportsFloat)]:
            raise TypeError(f"the part {part.name} returned {wrong[0]!r:.80} for a turn, wanted a number{at()}")
        given = RewardResult(total=0.0, turn_rewards=tuple(float(value) for value in paid_K))
    else:
        returned = part.reward(trajectory, problem)
        try:
            given = RewardResult.of(returned)
        except TypeError as error:
            raise TypeError(f"the part {part.name} {error}{at()}") from error
    if len(given.turn_rewards) not in ((turns,) if pays_turns else (0, turns)):
        raise ValueError(
            f"the part {part.name} returned {len(given.turn_rewards)} turn rewards for {turns} turns, wanted one per "
            f"turn{at()}"
        )
    turn_K = tuple(part.weight * value for value in given.turn_rewards)
    total = part.weight * given.total
    return replace(
        given, total=total, components={part.name: sum(turn_K) if pays_turns else total}, turn_rewards=turn_K
    )
