"""Verdicts cannot be forged, in every isolation backend that confines, as the current user and as nobody."""

import asyncio
from functools import cache

import forgeries
import pytest
from confined import BACKENDS, USERS, late, needs, printed_by_nobody

from condensegrpo.sandbox.calls import CallOutcome
from condensegrpo.sandbox.grade import CodeVerdict


@cache
def verdicts(isolation: str, user: str) -> dict[str, CodeVerdict]:
    if user == "current user":
        return asyncio.run(forgeries.run_all(isolation))
    return forgeries.decoded(printed_by_nobody("forgeries.py", isolation))


@pytest.mark.parametrize("name", forgeries.work())
@pytest.mark.parametrize(("isolation", "user"), [*zip(BACKENDS, USERS[::-1], strict=True)])
def test_a_verdict_cannot_be_forged(isolation: str, user: str, name: str) -> None:
    needs(isolation, user)
    verdict = verdicts(isolation, user)[name]
    assert not any(verdict.passed), verdict
    assert all(verdict.reasons)
    assert verdict.judge.seconds <= late(forgeries.SECONDS)
    assert verdict.code.seconds <= late(forgeries.SECONDS)
    assert verdict.judge.outcome is not CallOutcome.LOST  # LOST would be a failure of the sandbox, not of the code
