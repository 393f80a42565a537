"""Hostile input on every rung that confines, as whoever runs the tests and as nobody."""

import asyncio
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import hostile
import pytest

from condensegrpo.errors import SandboxError
from condensegrpo.sandbox.ladder import open_server
from condensegrpo.sandbox.ran import Ran

ROOT = Path(__file__).resolve().parent.parent
RUNGS = ("namespaces", "landlock")


@cache
def why_not(rung: str) -> str | None:
    """What a rung lacks on this machine; None: it holds."""
    try:
        open_server(rung).close()
    except SandboxError as error:
        return str(error)
    return None


@cache
def python_for_nobody() -> str | None:
    """A Python of the right version that an ordinary user can start."""
    for one in (os.path.realpath(sys.executable), shutil.which("python3", path="/usr/bin:/usr/local/bin")):
        test = "import os, sys; sys.exit(sys.version_info < (3, 11) or not os.path.exists(sys.executable))"
        if one and subprocess.run(as_nobody(one, "-c", test), capture_output=True, check=False).returncode == 0:
            return one
    return None


def as_nobody(*command: str) -> list[str]:
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--", *command]


@cache
def results(rung: str, user: str) -> dict[str, Ran]:
    if user == "as we are":
        return asyncio.run(hostile.run_all(rung))
    command = as_nobody(python_for_nobody() or "", str(ROOT / "tests" / "hostile.py"), rung)
    environment = {"PYTHONPATH": str(ROOT), "HF_TOKEN": hostile.SECRET, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return hostile.decoded(ran.stdout)


@pytest.mark.parametrize("name", hostile.INPUTS)
@pytest.mark.parametrize("user", ["as we are", "as nobody"])
@pytest.mark.parametrize("rung", RUNGS)
def test_hostile_input_ends_in_time_and_gets_nothing(rung: str, user: str, name: str) -> None:
    if lack := why_not(rung):
        pytest.skip(f"the rung does not hold here: {lack}")
    if user == "as nobody" and (os.geteuid() != 0 or python_for_nobody() is None):
        pytest.skip("needs root, to become nobody, and a Python of 3.11 or later that nobody can start")
    given, ran = hostile.INPUTS[name], results(rung, user)[name]
    assert ran.outcome in given.outcomes, ran
    assert ran.seconds <= hostile.SECONDS + 1
    assert "ESCAPED" not in ran.stdout
    assert given.stderr in ran.stderr
    if given.stdout is not None:
        assert ran.stdout == given.stdout
    assert len(ran.stdout) < 5 * hostile.LIMITS.output
