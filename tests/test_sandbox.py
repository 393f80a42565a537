"""The sandbox from outside: what a call gets, what it leaves behind, and which isolation backend runs it."""

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confined import BACKENDS, ROOT, gone, late, processes, python_for_nobody, why_not
from hostile import descriptors
from waiting import eventually

from condensegrpo.core.errors import SandboxError
from condensegrpo.sandbox.calls import MIB, CallOutcome, SandboxLimits
from condensegrpo.sandbox.sandbox import Sandbox
from condensegrpo.sandbox.supervisor import OutputBuffer

LIMITS = SandboxLimits(seconds=60, memory_mib=256)


@pytest.fixture(scope="module", params=[*BACKENDS, "none"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if request.param != "none" and (lack := why_not(request.param)):
        pytest.skip(f"the backend does not work here: {lack}")
    with Sandbox(isolation=request.param, limits=LIMITS) as shared:
        yield shared


def environment(process: int) -> bytes:
    """The environment of a process at its start; empty if it has ended."""
    try:
        return Path(f"/proc/{process}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_a_call_returns_its_output_and_exit_status(sandbox: Sandbox) -> None:
    result = sandbox.run_python_now("import sys\nprint('a')\nprint('b', file=sys.stderr)\nsys.exit(3)")
    assert (result.outcome, result.status, result.signal, result.stdout, result.stderr) == (
        CallOutcome.FAILED,
        3,
        None,
        "a\n",
        "b\n",
    )
    assert 0 < result.seconds < 60


def test_a_traceback_is_printed_as_by_the_interpreter(sandbox: Sandbox) -> None:
    result = sandbox.run_python_now("def f():\n    return 1 / 0\nf()")
    marked = "    ~^^\n" if sys.version_info >= (3, 13) else ""  # before, not if it was the whole line
    assert result.stderr == (
        f'Traceback (most recent call last):\n  File "<code>", line 3, in <module>\n    f()\n{marked}'
        '  File "<code>", line 2, in f\n    return 1 / 0\n           ~~^~~\nZeroDivisionError: division by zero\n'
    )


def test_code_reads_its_input_and_files(sandbox: Sandbox) -> None:
    files = {"helper.py": "def twice(x): return 2 * x", "data/ä.txt": "text\n"}
    code = "import helper, sys\nprint(helper.twice(int(input())), sys.stdin.read(), open('data/ä.txt').read(), end='')"
    assert sandbox.run_python_now(code, stdin="21\nrest", files=files).stdout == "42 rest text\n"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
def test_a_file_outside_of_the_folder_is_refused(sandbox: Sandbox, name: str) -> None:
    result = sandbox.run_python_now("print(1)", files={name: "x"})
    assert (result.outcome, result.stdout) == (CallOutcome.LOST, "")
    assert "wanted a path within its folder" in result.detail


def test_code_runs_as_main(sandbox: Sandbox) -> None:
    code = "import __main__, threading\nx = 1\nprint(__name__, __main__.x)\n"
    code += "threading.Thread(target=print, args=(2,)).start()"
    assert sandbox.run_python_now(code).stdout == "__main__ 1\n2\n"


def test_dataclasses_asyncio_and_temporary_files_work(sandbox: Sandbox) -> None:
    code = """
import asyncio, dataclasses, inspect, tempfile
@dataclasses.dataclass
class A: x: int
async def f(): return A(1)
with tempfile.TemporaryFile() as file: file.write(b"x")
print(asyncio.run(f()), inspect.getsource(f), end="")
"""
    result = sandbox.run_python_now(code)
    assert result.stdout == "A(x=1) async def f(): return A(1)\n", result.stderr


def test_calls_share_no_state(sandbox: Sandbox) -> None:
    first = (
        "import builtins, json, os, sys\nbuiltins.len = None\njson.x = 1\nopen('left', 'w').close()\nsys.path.clear()"
    )
    second = "import json, os\nprint(len('ab'), hasattr(json, 'x'), os.listdir('.'))"
    assert sandbox.run_python_now(first).outcome is CallOutcome.FINISHED
    assert sandbox.run_python_now(second).stdout == "2 False []\n"


def test_random_numbers_differ_between_calls_and_hashes_do_not(sandbox: Sandbox) -> None:
    first, second = (
        sandbox.run_python_now("import random; print(hash('a'), random.random())").stdout for _ in range(2)
    )
    assert first.split()[0] == second.split()[0]
    assert first.split()[1] != second.split()[1]


def test_output_before_the_time_limit_is_kept(sandbox: Sandbox) -> None:
    result = sandbox.run_python_now("print('before')\nwhile True: pass", seconds=1.5)
    assert (result.outcome, result.stdout) == (CallOutcome.TIMEOUT, "before\n")
    assert 1.5 <= result.seconds < late(1.5)


def test_long_output_keeps_its_beginning_and_end(sandbox: Sandbox) -> None:
    limits = SandboxLimits(seconds=60, memory_mib=256, output_bytes=20)
    with Sandbox(isolation=sandbox.open(), limits=limits) as other:
        result = other.run_python_now("print('a' * 10 + 'x' * 1000 + 'b' * 9)")
    assert result.stdout == "aaaaaaaaaa\n[… 1000 bytes omitted …]\nbbbbbbbbb\n"


def test_a_report_larger_than_the_buffer_of_a_socket_arrives(sandbox: Sandbox) -> None:
    limits = SandboxLimits(seconds=60, memory_mib=256, output_bytes=8 * MIB)
    with Sandbox(isolation=sandbox.open(), limits=limits) as other:
        result = other.run_python_now("print('x' * 3_000_000)")
    assert (result.outcome, len(result.stdout)) == (CallOutcome.FINISHED, 3_000_001), result.detail


async def _cancelled(sandbox: Sandbox) -> float:
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sandbox.run_python("print('mark'); import time; time.sleep(60)", seconds=60), 0.3)
    return time.monotonic() - begin


def test_a_call_whose_caller_is_cancelled_ends(sandbox: Sandbox) -> None:
    folder = sandbox.running().folder
    assert asyncio.run(_cancelled(sandbox)) < 30
    assert gone(folder, but=1)  # the server


def test_a_daemon_ends_with_its_call(sandbox: Sandbox) -> None:
    code = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(60)\n  os._exit(0)"
    assert sandbox.run_python_now(code).seconds < 30
    assert gone(sandbox.running().folder, but=1)


def test_calls_leave_no_descriptors_files_or_processes(sandbox: Sandbox) -> None:
    sandbox.run_python_now("print(1)")
    before = descriptors()
    for _ in range(5):
        sandbox.run_python_now("open('x', 'w').write('x')")
    assert descriptors() == before
    folder = Path(sandbox.running().folder)
    assert eventually(lambda: not folder.exists() or not list(folder.iterdir()))


@pytest.mark.parametrize("isolation", [*BACKENDS, "none"])
def test_nothing_is_left_after_closing(isolation: str) -> None:
    if isolation != "none" and (lack := why_not(isolation)):
        pytest.skip(f"the backend does not work here: {lack}")
    before = descriptors()
    with Sandbox(isolation=isolation, limits=LIMITS) as sandbox:
        sandbox.run_python_now("print(1)")
        folder = sandbox.running().folder
        assert processes(folder)
    assert gone(folder)
    assert not Path(folder).exists()
    assert descriptors() == before
    with pytest.raises(SandboxError, match="it was closed"):
        sandbox.open()
    sandbox.close()


def test_a_sandbox_that_nothing_refers_to_is_closed() -> None:
    sandbox = Sandbox(limits=LIMITS)
    sandbox.run_python_now("print(1)")
    folder = sandbox.running().folder
    del sandbox
    gc.collect()
    assert gone(folder)
    assert not Path(folder).exists()


def test_a_program_closes_its_sandbox_at_exit_and_its_forks_do_not() -> None:
    program = (
        "import os, sys\nfrom condensegrpo.sandbox.sandbox import Sandbox\nsandbox = Sandbox()\n"
        "print(sandbox.running().folder)\nsys.stdout.flush()\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait()\nprint(sandbox.run_python_now('print(6 * 7)').stdout)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    folder, *output = result.stdout.split()
    assert output == ["42"]
    assert gone(folder)
    assert not Path(folder).exists()


def test_two_sandboxes_of_equal_settings_share_no_process() -> None:
    with Sandbox(limits=LIMITS) as one, Sandbox(limits=LIMITS) as other:
        assert one.running().folder != other.running().folder
        one.close()
        assert other.run_python_now("print(1)").stdout == "1\n"


def test_a_server_that_was_killed_is_replaced(sandbox: Sandbox) -> None:
    server = sandbox.running()
    folder = server.folder
    os.kill(processes(folder)[0], signal.SIGKILL)
    assert gone(folder)
    while server.alive():  # the command line of a process is gone shortly before the process
        time.sleep(0.01)
    assert sandbox.run_python_now("print(1)").stdout == "1\n"
    assert not Path(folder).exists()


@pytest.mark.parametrize("isolation", [*BACKENDS, "none"])
def test_calls_end_with_the_process_of_their_caller(isolation: str) -> None:
    if isolation != "none" and (lack := why_not(isolation)):
        pytest.skip(f"the backend does not work here: {lack}")
    program = (
        "import os, signal, threading, time\nfrom condensegrpo.sandbox.sandbox import Sandbox\n"
        f"one = Sandbox(isolation={isolation!r})\nprint(one.running().folder, flush=True)\n"
        "threading.Thread(target=one.run_python_now, args=('while True: pass',)).start()\ntime.sleep(0.3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240)
    folder = result.stdout.strip()
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert gone(folder)
    assert not Path(folder).exists()


def test_concurrent_calls_return_their_own_output(sandbox: Sandbox) -> None:
    async def outputs() -> list[str]:
        results = await asyncio.gather(*(sandbox.run_python(f"print({n})") for n in range(32)))
        return [result.stdout for result in results]

    assert asyncio.run(outputs()) == [f"{n}\n" for n in range(32)]


def test_configured_packages_can_be_imported_and_no_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # pytest's mode 0700 would exclude the user nobody, who runs the code when root starts it
    (tmp_path / "given_package.py").write_text("x = 7", encoding="utf-8")
    with Sandbox(limits=LIMITS, packages=[str(tmp_path)]) as sandbox:
        assert sandbox.run_python_now("import given_package; print(given_package.x)").stdout == "7\n"
        assert sandbox.run_python_now("import torch").outcome is CallOutcome.FAILED


def test_auto_uses_the_strongest_backend_that_works() -> None:
    working = [isolation for isolation in BACKENDS if why_not(isolation) is None]
    if not working:
        pytest.skip("no backend works here")
    with Sandbox() as sandbox:
        assert sandbox.open() == working[0]


def without_user_namespaces(program: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in a user namespace that allows no further ones."""
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh", sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def test_without_user_namespaces_auto_uses_landlock() -> None:
    if shutil.which("unshare") is None or without_user_namespaces("").returncode != 0:
        pytest.skip("needs user namespaces, to create one that allows no further ones")
    if lack := why_not("landlock"):
        pytest.skip(f"the backend does not work here: {lack}")
    program = (
        "from condensegrpo.sandbox.sandbox import Sandbox\n"
        "with Sandbox() as one: print(one.open(), one.run_python_now('print(6 * 7)').stdout)"
    )
    result = without_user_namespaces(program)
    assert result.stdout == "landlock 42\n\n", result.stderr


def test_under_landlock_root_runs_code_as_nobody_if_nobody_can_read_python() -> None:
    if os.geteuid() != 0 or (python := python_for_nobody()) is None:
        pytest.skip("needs root, and a Python of 3.11 or later that the user nobody can start")
    if lack := why_not("landlock"):
        pytest.skip(f"the backend does not work here: {lack}")
    program = (
        "from condensegrpo.sandbox.sandbox import Sandbox\n"
        'code = \'import os, a; open("made", "w"); print(os.getuid(), a.x)\'\n'
        "with Sandbox(isolation='landlock') as one: print(one.run_python_now(code, files={'a.py': 'x = 1'}).stdout)"
    )
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run([python, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout == "65534 1\n\n", result.stderr


def test_without_a_working_backend_code_is_refused_and_the_message_says_why() -> None:
    program = (
        "from condensegrpo.sandbox import seccomp\nfrom condensegrpo.sandbox.sandbox import Sandbox\n"
        "seccomp.confine_syscalls(alone=False)\n"  # simulates a machine without namespaces and Landlock
        "try: Sandbox().open()\nexcept Exception as error: print(type(error).__name__, error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert result.stdout.startswith("SandboxError opening the sandbox: no isolation backend works on this machine")
    for part in ("namespaces: ", "unshare", "landlock: ", "to enable it: ", "sandbox.isolation=none"):
        assert part in result.stdout


def test_the_server_does_not_inherit_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-ours")
    with Sandbox(limits=LIMITS) as sandbox:
        environments = [environment(server) for server in processes(sandbox.running().folder)]
    assert any(environments)
    assert not any(b"secret-of-ours" in each for each in environments)


@pytest.mark.parametrize(
    "limits", [{"seconds": 0}, {"seconds": float("inf")}, {"memory_mib": 1}, {"processes": 0}, {"output_bytes": 1}]
)
def test_limits_out_of_range_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        SandboxLimits(**limits)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("pieces", [[b"abcdefghij"], [b"ab", b"cdefgh", b"ij"], [bytes([c]) for c in b"abcdefghij"]])
@pytest.mark.parametrize(
    ("most", "text"),
    [
        (10, "abcdefghij"),
        (11, "abcdefghij"),
        (6, "abc\n[… 4 bytes omitted …]\nhij"),
        (2, "a\n[… 8 bytes omitted …]\nj"),
    ],
)
def test_an_output_buffer_keeps_head_and_tail_for_any_chunking(pieces: list[bytes], most: int, text: str) -> None:
    buffer = OutputBuffer(most)
    for piece in pieces:
        buffer.add(piece)
    assert buffer.text() == text
