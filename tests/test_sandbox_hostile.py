"""Hostile input on every rung that confines, as whoever runs the tests and as nobody."""

import asyncio
from functools import cache

import hostile
import pytest
from confined import RUNGS, USERS, late, needs, printed_by_nobody


@cache
def results(rung: str, user: str) -> hostile.Run:
    if user == "as we are":
        return asyncio.run(hostile.run_all(rung))
    return hostile.decoded(printed_by_nobody("hostile.py", rung))


@pytest.mark.parametrize("name", hostile.INPUTS)
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("rung", RUNGS)
def test_hostile_input_ends_in_time_and_gets_nothing(rung: str, user: str, name: str) -> None:
    needs(rung, user)
    given, ran = hostile.INPUTS[name], results(rung, user).ran[name]
    assert ran.outcome in given.outcomes, ran
    assert ran.seconds <= late(hostile.SECONDS)
    assert "ESCAPED" not in ran.stdout
    assert given.stderr in ran.stderr
    if given.stdout is not None:
        assert ran.stdout == given.stdout
    assert len(ran.stdout) < 5 * hostile.LIMITS.output_bytes


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("rung", RUNGS)
def test_hostile_input_leaves_no_process_file_or_descriptor_and_the_next_call_works(rung: str, user: str) -> None:
    needs(rung, user)
    found = results(rung, user)
    assert found.left == []
    assert (found.after.outcome, found.after.stdout) == ("finished", "1\n")
