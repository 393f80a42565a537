"""A reward that leaves a program running in the sandbox, and then the interpreter no chance to run anything else."""

import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import psutil

from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.sandbox.sandbox import Sandbox


class Holding:
    """Writes the file ``begun``, then holds the interpreter's lock for ever in a call of C."""

    def __init__(self, *, begun: str, sandbox: Sandbox) -> None:
        self._begun = Path(begun)
        self._sandbox = sandbox

    def __call__(self, trajectory: Trajectory, problem: Problem) -> Mapping[str, float]:
        sandboxed = "import subprocess, time\nsubprocess.Popen(['sleep', '1000'])\ntime.sleep(1000)"
        call = partial(self._sandbox.run_python_now, sandboxed, seconds=1000)
        threading.Thread(target=call, daemon=True).start()
        while "sleep" not in map(_name, psutil.Process().children(recursive=True)):
            time.sleep(0.02)
        self._begun.touch()
        return {"sum": float(sum(range(10**12)))}


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:  # one of those that start the sandbox
        return ""
