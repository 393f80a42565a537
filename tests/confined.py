"""Helpers of the sandbox's tests: which rungs hold here, and programs run as the user nobody."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from condensegrpo.core.errors import SandboxError
from condensegrpo.sandbox.ladder import open_server

ROOT = Path(__file__).resolve().parent.parent
RUNGS = ("namespaces", "landlock")
USERS = ("as we are", "as nobody")
SECRET = "hf_thisisasecret"


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


def printed_by_nobody(script: str, *arguments: str) -> str:
    """What a program among the tests prints when the user nobody runs it."""
    command = as_nobody(python_for_nobody() or "", str(ROOT / "tests" / script), *arguments)
    environment = {"PYTHONPATH": str(ROOT), "HF_TOKEN": SECRET, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False, timeout=180)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def needs(rung: str, user: str) -> None:
    """Skip where the rung does not hold, or nobody cannot be had."""
    if lack := why_not(rung):
        pytest.skip(f"the rung does not hold here: {lack}")
    if user == "as nobody" and (os.geteuid() != 0 or python_for_nobody() is None):
        pytest.skip("needs root, to become nobody, and a Python of 3.11 or later that nobody can start")


def late(seconds: float) -> float:
    """The time by which a call of a limit has ended: the limit and 1 s, of which an overloaded machine takes more."""
    return seconds + max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
