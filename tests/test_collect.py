"""Failed trajectories are told of; a batch of nothing but failures is an error."""

import pytest
from builders import scored, trajectory

from condensegrpo.collect import tell_failures
from condensegrpo.errors import RolloutError
from condensegrpo.trajectory import ScoredTrajectory, Stop


def ended(*stops: Stop) -> list[ScoredTrajectory]:
    return [scored(trajectory(stop=stop, answer=None), 0.0, correct=0.0) for stop in stops]


def test_nothing_is_said_where_nothing_failed() -> None:
    """A wrong format or a cut-off reply is the policy's doing, not a failure."""
    said: list[str] = []
    tell_failures(ended(Stop.FORMAT, Stop.OUTPUT_LENGTH, Stop.TURN_LIMIT), said.append)
    tell_failures([], said.append)
    assert said == []


def test_some_failures_are_counted_and_the_first_is_named() -> None:
    said: list[str] = []
    tell_failures(ended(Stop.FORMAT, Stop.ENVIRONMENT_ERROR, Stop.SAMPLER_ERROR), said.append)
    (text,) = said
    assert text.startswith("2 of 3 trajectories failed; the first (environment_error)")


@pytest.mark.parametrize("stop", [Stop.ENVIRONMENT_ERROR, Stop.SAMPLER_ERROR])
def test_nothing_but_failures_is_an_error(stop: Stop) -> None:
    with pytest.raises(RolloutError, match="2 of 2 trajectories failed"):
        tell_failures(ended(stop, stop), lambda text: None)
