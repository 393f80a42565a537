"""Verdicts that cannot be forged, on every rung that confines, as whoever runs the tests and as nobody."""

import asyncio
from functools import cache

import forgeries
import pytest
from confined import RUNGS, USERS, late, needs, printed_by_nobody

from condensegrpo.sandbox.grade import Verdict
from condensegrpo.sandbox.ran import Outcome


@cache
def verdicts(rung: str, user: str) -> dict[str, Verdict]:
    if user == "as we are":
        return asyncio.run(forgeries.run_all(rung))
    return forgeries.decoded(printed_by_nobody("forgeries.py", rung))


@pytest.mark.parametrize("name", forgeries.work())
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("rung", RUNGS)
def test_a_verdict_cannot_be_forged(rung: str, user: str, name: str) -> None:
    needs(rung, user)
    found = verdicts(rung, user)[name]
    assert not any(found.passed), found
    assert all(found.reasons)
    assert found.judge.seconds <= late(forgeries.SECONDS)
    assert found.code.seconds <= late(forgeries.SECONDS) + 1  # it is given a second more
    assert found.judge.outcome is not Outcome.LOST  # the sandbox's failure, which nobody can be blamed for
