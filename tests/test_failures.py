"""Trajectories that failed are counted by kind and reported; too many of them are an error."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders import scored, trajectory

from condensegrpo.core.errors import TooManyFailed
from condensegrpo.core.failures import PluginFailure
from condensegrpo.core.observer import Observer
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import StopReason
from condensegrpo.episodes.failures import FailureWatch, check_failures, failures_of, mostly_cut


class Listening(Observer):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def trajectories_failed(self, text: str, traceback: str) -> None:
        self.lines.append(text)


def ended(*stops: StopReason, failure: PluginFailure | None = None) -> list[ScoredTrajectory]:
    return [scored(replace(trajectory(stop=stop, answer=None), failure=failure), 0.0, correct=0.0) for stop in stops]


def reported(*ranks: Sequence[ScoredTrajectory]) -> list[str]:
    observer = Listening()
    check_failures([failures_of(rank) for rank in ranks], observer)
    return observer.lines


def raised(message: str, location: str) -> PluginFailure:
    return PluginFailure(source="the reward Brief", error="KeyError", message=message, location=location)


def test_nothing_is_said_where_nothing_failed() -> None:
    """A wrong format or a cut-off reply is the policy's doing, not a failure."""
    assert reported(ended(StopReason.FORMAT, StopReason.OUTPUT_LENGTH, StopReason.TURN_LIMIT), []) == []


def test_failures_are_reported_in_one_line_for_each_kind() -> None:
    """A kind is a plug-in, an exception and a line: the message may differ."""
    errors = [StopReason.REWARD_ERROR]
    batch = [
        *ended(StopReason.ANSWERED),
        *ended(*errors, failure=raised("'b'", "mine.py:9")),
        *ended(*errors, failure=raised("'a'", "mine.py:3")),
    ]
    assert reported(batch, ended(*errors, failure=raised("'c'", "mine.py:3"))) == [
        "2 of 4 trajectories failed (reward_error): the reward Brief: KeyError: 'a' (mine.py:3); first in p0/0",
        "1 of 4 trajectories failed (reward_error): the reward Brief: KeyError: 'b' (mine.py:9); first in p0/0",
    ]


@pytest.mark.parametrize("stop", [StopReason.ENVIRONMENT_ERROR, StopReason.SAMPLER_ERROR, StopReason.REWARD_ERROR])
def test_nothing_but_failures_is_an_error(stop: StopReason) -> None:
    failed = ended(stop, failure=raised("'a'", "mine.py:3"))
    with pytest.raises(TooManyFailed, match=r"all 2 trajectories failed, 2 of them like this: the reward Brief: KeyE"):
        reported(failed, failed)


def test_a_rank_whose_trajectories_all_failed_is_an_error_on_all_ranks() -> None:
    """A rank without any trajectory did not fail."""
    broken, well = (
        ended(StopReason.ENVIRONMENT_ERROR, StopReason.SAMPLER_ERROR),
        ended(StopReason.ANSWERED, StopReason.FORMAT),
    )
    first, second = reported(well, broken, [])
    assert first.startswith("1 of 4 trajectories failed (environment_error)")
    assert second.startswith("1 of 4 trajectories failed (sampler_error)")
    failures = [failures_of(rank) for rank in (well, broken, [])]
    with pytest.raises(TooManyFailed, match="all 2 trajectories of rank 1 failed"):
        FailureWatch(1.0).check(failures, Observer())
    FailureWatch(1.0).check([failures_of(well), failures_of([*well, *broken]), failures_of([])], Observer())


def test_most_failures_of_two_steps_in_a_row_are_an_error_that_counts_the_kinds() -> None:
    reward, condenser = raised("'a'", "mine.py:3"), PluginFailure(source="the condenser", error="", message="lost")
    well, half = (
        failures_of(ended(StopReason.ANSWERED)),
        failures_of(ended(StopReason.ANSWERED, StopReason.REWARD_ERROR)),
    )
    rank = ended(*[StopReason.REWARD_ERROR] * 2, failure=reward) + ended(
        StopReason.ENVIRONMENT_ERROR, failure=condenser
    )
    most = failures_of([*rank, *ended(StopReason.FORMAT)])
    watch = FailureWatch(0.5)
    for step in (half, half, most, half, most):
        watch.check([well, step], Observer())
    with pytest.raises(TooManyFailed) as error:
        watch.check([well, most], Observer())
    assert str(error.value) == (
        "3 of 5 trajectories failed, 2 of them like this: the reward Brief: KeyError: 'a' (mine.py:3); 1 of them like "
        "this: the condenser: lost. That is more than train.max_failed=0.5 of them: fix the cause, or raise the key."
    )
    all_failed = failures_of(rank[:2])  # a higher limit would not help
    with pytest.raises(TooManyFailed, match=r"all 2 trajectories failed, 2 of them like this: .* \(mine.py:3\)\.$"):
        check_failures([all_failed], Observer(), max_failed=0.5)


def test_most_trajectories_that_ran_out_of_tokens_are_a_sentence() -> None:
    overflow, answered = (StopReason.CONTEXT_OVERFLOW, "needs 38 tokens"), (StopReason.ANSWERED, "")
    said = "2 of 3 trajectories ended as context_overflow: needs 38 tokens"
    assert mostly_cut([answered, overflow, overflow]) == said
    assert mostly_cut([answered, overflow]) == ""
