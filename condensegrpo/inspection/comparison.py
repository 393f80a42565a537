"""Two siblings: where they part."""

from typing import NamedTuple

from condensegrpo.core.trajectory import Trajectory


class FirstDifference(NamedTuple):
    """The first difference of two trajectories."""

    turn: int
    where: str  # prompt, or reply


def first_difference(first: Trajectory, second: Trajectory) -> FirstDifference | None:
    """The first turn whose prompt or reply differ, by tokens and by texts; None: they are equal."""
    for number, (one, other) in enumerate(zip(first.turns, second.turns, strict=False)):
        if one.prompt_ids != other.prompt_ids or one.context != other.context:
            return FirstDifference(number, "prompt")
        if one.output_ids != other.output_ids or one.reply != other.reply:
            return FirstDifference(number, "reply")
    if len(first.turns) == len(second.turns):
        return None
    return FirstDifference(min(len(first.turns), len(second.turns)), "reply")
