"""Which isolation backend works on this machine. Each is probed by running code in it that tries to escape."""

import fcntl
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from condensegrpo.core.errors import SandboxError
from condensegrpo.sandbox import folders
from condensegrpo.sandbox.calls import CallOutcome, Isolation, SandboxLimits
from condensegrpo.sandbox.process import Server, python_request
from condensegrpo.sandbox.seccomp import numbers

AUTO = "auto"
REMEDIES = {
    Isolation.NAMESPACES: "allow unprivileged user namespaces: sysctl -w user.max_user_namespaces=15000, and where "
    "they exist kernel.unprivileged_userns_clone=1 (Debian), kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); "
    "in Docker, --security-opt seccomp=unconfined",
    Isolation.LANDLOCK: "use Linux 6.2 or later with landlock among the modules in /sys/kernel/security/lsm",
}
# prints the names of the attempts that succeeded; the path of the secret is inserted as a Python literal
_ESCAPES = """
import ctypes, json, os, socket
def succeeds(attempt):
    try:
        attempt()
    except Exception:
        return False
    return True
secret, outside = {secret!r}, {outside!r}
libc = ctypes.CDLL(None)
def signal_outside():
    os.kill(outside, 0)
def namespaces():
    assert libc.unshare(0x10000000) == 0
def trace():
    assert libc.syscall({ptrace}, 0, 0, 0, 0) == 0
attempts = dict(
    read_a_file_outside=lambda: open(secret).read(),
    read_processes_outside=lambda: os.listdir(f"/proc/{{outside}}"),
    signal_a_process_outside=signal_outside,
    open_a_socket=lambda: socket.socket(),
    make_namespaces=namespaces,
    trace_processes=trace,
)
escapes = [name for name, attempt in attempts.items() if succeeds(attempt)]
import tempfile
with open("made", "w") as file:
    file.write("kept")
assert open("made").read() == "kept"
succeeds(lambda: open(secret + ".new", "w"))  # the prober checks whether that file exists outside
if os.environ:
    escapes.append("read_the_environment")
print(json.dumps(escapes))
"""


def open_server(isolation: str = AUTO, packages: Sequence[str] = ()) -> Server:
    """Start a server with a backend that works; ``auto`` takes the strongest one, and never ``none``."""
    if isolation == Isolation.NONE:
        return Server(Isolation.NONE, packages)
    candidates = [Isolation.NAMESPACES, Isolation.LANDLOCK] if isolation == AUTO else [Isolation(isolation)]
    faults = ""
    for candidate in candidates:
        try:
            return _probed(candidate, packages)
        except SandboxError as error:
            faults += f"  {candidate}: {error}\n    to enable it: {REMEDIES[candidate]}\n"
    raise SandboxError(
        f"opening the sandbox: no isolation backend works on this machine, so code of a model is not run.\n{faults}"
        f"  Or, on a disposable machine, set sandbox.isolation=none: code then runs with your own rights."
    )


def probe_backends() -> dict[Isolation, str | None]:
    """For each backend that confines, strongest first, why it does not work here; None if it works."""
    faults: dict[Isolation, str | None] = {}
    for isolation in (Isolation.NAMESPACES, Isolation.LANDLOCK):
        try:
            _probed(isolation, ()).close()
            faults[isolation] = None
        except SandboxError as error:
            faults[isolation] = str(error)
    return faults


def _probed(isolation: Isolation, packages: Sequence[str]) -> Server:
    """A server that code did not escape from. SandboxError: it escaped, or did not run."""
    server = Server(isolation, packages)
    try:
        _probe(server)
    except BaseException:
        server.close()
        raise
    return server


def _probe(server: Server) -> None:
    """Run code on a server that tries to escape."""
    with tempfile.NamedTemporaryFile(prefix=folders.PREFIX, mode="w", encoding="ascii") as secret:
        fcntl.flock(secret, fcntl.LOCK_SH)  # not a leftover
        secret.write("not to be read")
        secret.flush()
        Path(secret.name).chmod(0o644)
        code = _ESCAPES.format(secret=secret.name, outside=os.getpid(), ptrace=numbers()["ptrace"])
        call = server.call()
        call.send(python_request(code, SandboxLimits()))
        result = call.result()
        written = Path(f"{secret.name}.new")
        if written.exists():
            written.unlink()
            raise SandboxError("confined code was able to write a file outside")
    if result.outcome is not CallOutcome.FINISHED:
        raise SandboxError(f"a probe call ended as {result.outcome}: {(result.detail or result.stderr).strip()}")
    escapes = json.loads(result.stdout)
    if escapes:
        raise SandboxError(f"confined code was able to {', '.join(escapes).replace('_', ' ')}")
