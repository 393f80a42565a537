"""Starts a program in a folder, within limits (``sandbox/program.py``), and reads what it leaves."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from condensegrpo.sandbox.limits import SandboxLimits

END_SECONDS = 10.0
_ROOT = str(Path(__file__).resolve().parents[2])
_MAIN = "import sys; sys.path.insert(0, sys.argv[1]); from condensegrpo.sandbox.program import main; main()"
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ")


class ProgramFailed(Exception):
    """A program could not be started, exceeded a limit, or ended with a status that is none of success."""


class LimitExceeded(ProgramFailed):
    """A program exceeded a limit."""


async def run_program(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str], limits: SandboxLimits, log: Path
) -> int:
    """Run a program to its end; with a cancellation it ends, and every process that it started.

    Args:
        folder: in which it runs; also its home and the place of its temporary files.
        environment: its variables, beside ``PATH`` and those of the locale.
        log: prefix of the files of its output, ``.out`` and ``.err``.

    Returns:
        Its exit status, or −signal.
    """
    files = {"folder": str(folder), "stdout": f"{log}.out", "stderr": f"{log}.err"}
    request = {"command": list(command), "limits": asdict(limits), **files}
    text = json.dumps(request, ensure_ascii=False)  # the kernel limits its bytes, of which an escaped letter has six
    inherited = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _MAIN, _ROOT, text),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the owner
        env={**inherited, "HOME": str(folder), "TMPDIR": str(folder), **environment},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        report = json.loads(await process.stdout.read() or b'{"trouble": "its supervisor was killed"}')
    finally:
        process.stdin.close()  # which ends the program
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_SECONDS)
    if trouble := report.get("trouble"):
        raise ProgramFailed(f"starting {command[0]!r}: {trouble}")
    if limit := report["limit"]:
        raise LimitExceeded(f"{command[0]!r} exceeded its limit {limit}={getattr(limits, limit)}")
    return int(report["status"])


def last_text(file: Path, limits: SandboxLimits) -> str:
    """The last ``output_bytes`` of a file as text; empty: there is no such file."""
    if not file.is_file():
        return ""
    with file.open("rb") as opened:
        opened.seek(max(file.stat().st_size - limits.output_bytes, 0))
        return opened.read().decode("utf-8", "replace").strip()
