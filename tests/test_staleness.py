"""Which batches are sampled under which weights, and how old trajectories may get."""

from dataclasses import replace

import pytest
from builders import turn
from hypothesis import given
from hypothesis import strategies as st

from condensegrpo.core.errors import RunError
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.training.rollout import check_staleness, last_prefetched, sampler_gets_weights, staleness_of


def versions(staleness: int, steps: int) -> list[int]:
    """The weights under which each batch of a run is sampled, by the rules that the loop keeps."""
    found: dict[int, int] = {}
    version = 0
    for step in range(1, steps + 1):
        if step not in found or sampler_gets_weights(step - 1, staleness):
            for batch in range(step, last_prefetched(step, staleness=staleness, steps=steps) + 1):
                found.setdefault(batch, version)
        if sampler_gets_weights(step, staleness):
            version = step
    return [found[step] for step in range(1, steps + 1)]


def test_the_examples_of_the_module() -> None:
    assert versions(0, 5) == [0, 1, 2, 3, 4]
    assert versions(1, 5) == [0, 0, 1, 2, 3]
    assert versions(2, 7) == [0, 0, 0, 2, 2, 4, 4]


@given(staleness=st.integers(0, 6), steps=st.integers(1, 40))
def test_every_batch_is_sampled_once_and_none_is_older_than_allowed(staleness: int, steps: int) -> None:
    ages = [step - 1 - version for step, version in enumerate(versions(staleness, steps), start=1)]
    assert len(ages) == steps
    assert min(ages) >= 0
    assert max(ages) == min(staleness, steps - 1)


def aged(*policy_versions: int) -> Trajectory:
    turns = tuple(replace(turn([1, 2], [3]), policy_version=version) for version in policy_versions)
    return Trajectory(
        id="7-a-0",
        problem_id="a",
        group_id="7-a",
        sample=0,
        turns=turns,
        stop=StopReason.ANSWERED,
        answer="1",
        seconds=1.0,
    )


def test_a_trajectory_is_as_stale_as_its_oldest_turn() -> None:
    """TRL#7206: by trajectory, not by row."""
    assert staleness_of(aged(6, 6), 7) == 0
    assert staleness_of(aged(6, 4, 6), 7) == 2
    assert staleness_of(aged(), 7) == 0


def test_what_is_too_old_is_no_data_to_train_on() -> None:
    check_staleness([aged(6), aged(5, 5)], step=7, staleness=1)
    with pytest.raises(RunError, match=r"7-a-0 has a turn that was sampled 2 optimiser steps ago, .*staleness is 1"):
        check_staleness([aged(6), aged(4)], step=7, staleness=1)
