"""Which rung holds on this machine: each is tried by running code on it that tries to get out, never assumed."""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from condensegrpo.core.errors import SandboxError
from condensegrpo.sandbox.limits import SandboxLimits
from condensegrpo.sandbox.process import Server
from condensegrpo.sandbox.ran import Outcome
from condensegrpo.sandbox.setting import Rung
from condensegrpo.sandbox.syscalls import numbers

AUTO = "auto"
CURES = {
    Rung.NAMESPACES: "allow unprivileged user namespaces: sysctl -w user.max_user_namespaces=15000, and where they "
    "exist kernel.unprivileged_userns_clone=1 (Debian), kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in "
    "Docker, --security-opt seccomp=unconfined",
    Rung.LANDLOCK: "use Linux 6.2 or later with landlock among the modules in /sys/kernel/security/lsm",
}
# prints what it managed to do, by name; the secret's path is put in as a Python literal
_ESCAPES = """
import ctypes, json, os, socket
def managed(attempt):
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
def kernel_memory():
    assert libc.syscall({ptrace}, 0, 0, 0, 0) == 0
tried = dict(
    read_a_file_outside=lambda: open(secret).read(),
    read_processes_outside=lambda: os.listdir(f"/proc/{{outside}}"),
    signal_a_process_outside=signal_outside,
    open_a_socket=lambda: socket.socket(),
    make_namespaces=namespaces,
    trace_processes=kernel_memory,
)
found = [name for name, attempt in tried.items() if managed(attempt)]
import tempfile
with open("made", "w") as file:
    file.write("kept")
assert open("made").read() == "kept"
managed(lambda: open(secret + ".new", "w"))  # whether it lies outside is seen there
print(json.dumps(dict(found=found, environment=len(os.environ))))
"""


def open_server(rung: str = AUTO, packages: Sequence[str] = ()) -> Server:
    """The server on a rung that holds; for ``auto`` on the strongest that does, never on ``none``.

    Raises:
        SandboxError: none does; the message names what each one lacks.
    """
    if rung == Rung.NONE:
        return Server(Rung.NONE, packages)
    wanted = [Rung.NAMESPACES, Rung.LANDLOCK] if rung == AUTO else [Rung(rung)]
    faults = []
    for one in wanted:
        try:
            return _tried(one, packages)
        except SandboxError as error:
            faults.append(f"  {one}: {error}\n    to have it: {CURES[one]}")
    listed = "\n".join(faults)
    raise SandboxError(
        f"opening the sandbox: no rung of isolation holds here, so code that a model wrote is not run.\n{listed}\n"
        f"  Or, on a machine that has nothing to lose, set sandbox.rung=none: then it runs as you, with your rights."
    )


def faults() -> dict[Rung, str | None]:
    """For each rung that confines, strongest first, why it does not hold here; None: it does."""
    found: dict[Rung, str | None] = {}
    for one in (Rung.NAMESPACES, Rung.LANDLOCK):
        try:
            _tried(one, ()).close()
            found[one] = None
        except SandboxError as error:
            found[one] = str(error)
    return found


def _tried(rung: Rung, packages: Sequence[str]) -> Server:
    server = Server(rung, packages)
    try:
        _try(server)
    except BaseException:
        server.close()
        raise
    return server


def _try(server: Server) -> None:
    """Run code on a server that tries to get out.

    Raises:
        SandboxError: it got out, or did not run at all.
    """
    with tempfile.NamedTemporaryFile(prefix="condensegrpo-sandbox-", mode="w", encoding="ascii") as secret:
        secret.write("not to be read")
        secret.flush()
        Path(secret.name).chmod(0o644)
        code = _ESCAPES.format(secret=secret.name, outside=os.getpid(), ptrace=numbers()["ptrace"])
        ran = server.run(code, SandboxLimits())
        written = Path(f"{secret.name}.new")
        if written.exists():
            written.unlink()
            raise SandboxError("code that was to be confined managed to write a file outside")
    if ran.outcome is not Outcome.FINISHED:
        raise SandboxError(f"a trial call ended as {ran.outcome}: {(ran.detail or ran.stderr).strip()}")
    report = json.loads(ran.stdout)
    if report["found"] or report["environment"]:
        managed = ", ".join([*report["found"], *(["read the environment"] if report["environment"] else [])])
        raise SandboxError(f"code that was to be confined managed to {managed.replace('_', ' ')}")
