"""The process that supervises a program with a network: keeps it within limits, and ends with its owner.

    owner  ── stdin: its end ends the program ──▶  this process  ──▶  the program and its descendants
           ◀── stdout: the report, as JSON ──

Unlike the jobs of the sandbox the program is not confined: it reads and writes what its user may. No descendant
survives it, whatever it does and however the owner ends. Standard library only.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from functools import partial

from condensegrpo.sandbox import linux
from condensegrpo.sandbox.calls import SandboxLimits
from condensegrpo.sandbox.job import limit_process
from condensegrpo.sandbox.supervisor import CHECK_EVERY, end_orphans, folder_exceeds, of_descendants

OWNER = 0  # stdin
LOOKING = 0.02  # share of the time that looking at all files of the folder may take


def main() -> None:
    """Run the program of a request (``argv[2]``) to its end; report ``status``, or the ``limit`` that it exceeded.

    The request: ``command``, its ``folder``, the files ``stdout`` and ``stderr``, and ``limits``.
    """
    request = json.loads(sys.argv[2])
    limits = SandboxLimits(**request["limits"])
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    report: dict[str, object]
    try:
        with open(request["stdout"], "wb") as out, open(request["stderr"], "wb") as err:
            program = subprocess.Popen(
                request["command"],
                cwd=request["folder"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=partial(_limited, limits),
            )
    except (OSError, subprocess.SubprocessError) as error:
        report = {"trouble": f"{type(error).__name__}: {error}"}
    else:
        limit = _exceeded(program.pid, limits, request["folder"], proc)
        if limit:
            program.kill()
        report = {"status": program.wait(), "limit": limit}
    end_orphans(proc)
    sys.stdout.write(json.dumps(report))


def _limited(limits: SandboxLimits) -> None:
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    limit_process(limits, count_processes=False, open_files=None)


def _exceeded(pid: int, limits: SandboxLimits, folder: str, proc: int) -> str:
    """Wait for the end of a program, or of its owner (``owner``), or for the limit that it exceeds; "" for its end."""
    deadline, ended = time.monotonic() + limits.seconds, os.pidfd_open(pid)
    too_large, due = False, 0.0  # of the folder, and when it is looked at again
    while True:
        ready, _, _ = select.select([OWNER, ended], [], [], CHECK_EVERY)
        if (began := time.monotonic()) >= due:
            too_large = folder_exceeds(folder, limits)
            now = time.monotonic()
            due = now + (now - began) / LOOKING
        used = of_descendants(os.getpid(), proc)
        checks = {
            "owner": OWNER in ready,
            "seconds": time.monotonic() > deadline,
            "memory_mib": used.memory > limits.memory_bytes,
            "processes": used.tasks > limits.processes,
            "disk_mib": too_large,
        }
        if ended in ready:
            return ""
        if any(checks.values()):
            return next(name for name, exceeded in checks.items() if exceeded)
