"""Hostile code in every isolation backend that confines, as the current user and as nobody."""

import asyncio
from functools import cache

import hostile
import pytest
from confined import BACKENDS, USERS, late, needs, printed_by_nobody


@cache
def results(isolation: str, user: str) -> hostile.Run:
    if user == "current user":
        return asyncio.run(hostile.run_all(isolation))
    return hostile.decoded(printed_by_nobody("hostile.py", isolation))


@pytest.mark.parametrize("name", hostile.INPUTS)
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("isolation", BACKENDS)
def test_hostile_code_ends_in_time_and_does_not_escape(isolation: str, user: str, name: str) -> None:
    needs(isolation, user)
    case, result = hostile.INPUTS[name], results(isolation, user).results[name]
    assert result.outcome in case.outcomes, result
    assert result.seconds <= late(case.seconds)
    assert "ESCAPED" not in result.stdout
    assert case.stderr in result.stderr
    if case.stdout is not None:
        assert result.stdout == case.stdout
    assert len(result.stdout) < 5 * hostile.LIMITS.output_bytes


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("isolation", BACKENDS)
def test_hostile_code_leaves_no_process_file_or_descriptor_and_the_next_call_works(isolation: str, user: str) -> None:
    needs(isolation, user)
    run = results(isolation, user)
    assert run.left == []
    assert (run.after.outcome, run.after.stdout) == ("finished", "1\n")
