"""Helpers of the sandbox's tests: which isolation backends work here, and programs run as the user nobody."""

import os
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from condensegrpo.core.errors import SandboxError
from condensegrpo.sandbox.process import open_server

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ("namespaces", "landlock")
USERS = ("current user", "as nobody")
SECRET = "hf_thisisasecret"


@cache
def why_not(isolation: str) -> str | None:
    """Why a backend does not work on this machine; None if it works."""
    try:
        open_server(isolation).close()
    except SandboxError as error:
        return str(error)
    return None


@cache
def python_for_nobody() -> str | None:
    """A Python of the right version that an ordinary user can start."""
    for python in (os.path.realpath(sys.executable), shutil.which("python3", path="/usr/bin:/usr/local/bin")):
        test = "import os, sys; sys.exit(sys.version_info < (3, 11) or not os.path.exists(sys.executable))"
        if python and subprocess.run(as_nobody(python, "-c", test), capture_output=True, check=False).returncode == 0:
            return python
    return None


def as_nobody(*command: str) -> list[str]:
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--", *command]


def printed_by_nobody(script: str, *arguments: str) -> str:
    """The output of a program in the tests folder, run by the user nobody."""
    command = as_nobody(python_for_nobody() or "", str(ROOT / "tests" / script), *arguments)
    environment = {"PYTHONPATH": str(ROOT), "HF_TOKEN": SECRET, "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False, timeout=180)
    assert result.returncode == 0, result.stderr
    return result.stdout


def needs(isolation: str, user: str) -> None:
    """Skip the test if the backend does not work, or programs cannot run as nobody."""
    if lack := why_not(isolation):
        pytest.skip(f"the backend does not work here: {lack}")
    if user == "as nobody" and (os.geteuid() != 0 or python_for_nobody() is None):
        pytest.skip("needs root, to become nobody, and a Python of 3.11 or later that the user nobody can start")


def processes(mark: str) -> list[int]:
    """The processes whose command line contains a text."""
    matching = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                matching.append(int(entry.name))
        except OSError:
            continue
    return matching


def gone(mark: str, *, but: int = 0) -> bool:
    """Whether no such process, or only so many, are left soon."""
    end = time.monotonic() + 30.0
    while len(processes(mark)) > but and time.monotonic() < end:
        time.sleep(0.02)
    return len(processes(mark)) <= but


def late(seconds: float) -> float:
    """The latest end of a call with a time limit: little more than the limit, also on an overloaded machine."""
    return seconds + 15.0
