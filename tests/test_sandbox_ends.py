"""Calls end in time, and nothing remains of them: when they multiply and detach, after SIGKILL, and across forks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from confined import BACKENDS, gone, late, processes, why_not

from condensegrpo.sandbox import process
from condensegrpo.sandbox.calls import CallOutcome, SandboxLimits
from condensegrpo.sandbox.folders import remove
from condensegrpo.sandbox.sandbox import Sandbox

HEAD = "import os, signal, sys, threading, time\nfrom condensegrpo.sandbox.sandbox import Sandbox\n"
# starts a call that fills its folder and never ends; the variable ``sandbox`` runs it
IN_A_CALL = """
sandbox = Sandbox(isolation=sys.argv[1])
code = "import os\\nos.mkdir('d', 0o300)\\nopen('d/x', 'w').write('x')\\nprint('x')\\nwhile True: pass"
folder = sandbox.running().folder
threading.Thread(target=sandbox.run_python_now, args=(code,), daemon=True).start()
time.sleep(0.3)
print(folder, flush=True)
"""
# forks daemons that ignore every signal, as fast as it can, while there are few of them
BOMB = """
import os, signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
end = time.monotonic() + 40
def fork():
    try: return os.fork() if few() else 1
    except OSError: return 1
def few():
    try: return len(os.listdir('/proc')) < MOST
    except OSError: return True  # not visible, and the kernel limits their number
while time.monotonic() < end:
    if fork() == 0:
        os.setsid()
        if fork(): os._exit(0)
"""


def needs_backend(isolation: str) -> None:
    if isolation != "none" and (lack := why_not(isolation)):
        pytest.skip(f"the backend does not work here: {lack}")


@pytest.fixture
def killed() -> Iterator[list[int]]:
    """Processes that are killed at the end of the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("isolation", [*BACKENDS, "none"])
def test_processes_that_multiply_detach_and_ignore_signals_end_with_their_call(isolation: str) -> None:
    needs_backend(isolation)
    code = BOMB.replace("MOST", str(len(os.listdir("/proc")) + 60))
    with Sandbox(isolation=isolation, limits=SandboxLimits(seconds=0.5)) as sandbox:
        folder = sandbox.running().folder
        begin = time.monotonic()
        result = sandbox.run_python_now(code)
        seconds = time.monotonic() - begin
        assert result.outcome in ("timeout", "processes", "memory", "failed"), result
        assert gone(folder, but=1)  # the server
    assert seconds < late(0.5)


@pytest.mark.parametrize("isolation", [*BACKENDS, "none"])
def test_a_program_that_ends_or_stops_itself_is_said_to_have_done_so(isolation: str) -> None:
    needs_backend(isolation)
    ends = {
        "os.kill(os.getpid(), signal.SIGKILL)": "it was ended by SIGKILL",
        "os.kill(os.getpid(), signal.SIGTERM)": "it was ended by SIGTERM",
        "signal.setitimer(signal.ITIMER_REAL, 0.05)\nwhile True: pass": "it was ended by SIGALRM",
        "os.kill(os.getpid(), signal.SIGSTOP)": "it was stopped by SIGSTOP",
    }
    with Sandbox(isolation=isolation, limits=SandboxLimits(seconds=0.9)) as sandbox:
        for code, said in ends.items():
            result = sandbox.run_python_now(f"import os, signal\nprint('begun', flush=True)\n{code}")
            assert (result.outcome, result.detail, result.stdout) == (CallOutcome.KILLED, said, "begun\n"), result
            assert result.status is None
            assert said.endswith(signal.Signals(result.signal or 0).name)


def test_removing_a_folder_changes_nothing_outside_of_it(tmp_path: Path) -> None:
    """A hard link and a link to a folder in it: chmod of the whole followed both."""
    kept, away = tmp_path / "kept", tmp_path / "away"
    kept.mkdir()
    away.mkdir()
    (kept / "file").write_text("mine")
    (kept / "file").chmod(0o444)
    os.link(kept / "file", away / "hard")
    (away / "link").symlink_to(kept)
    (away / "locked").mkdir(mode=0o000)
    remove(str(away))
    assert not away.exists()
    assert ((kept / "file").stat().st_mode & 0o777, kept.is_dir()) == (0o444, True)


def test_deep_folders_do_not_hold_up_a_result() -> None:
    """They are removed behind it: the folder of a call is still there when its result is, of one in three at least."""
    code = "import os\nprint(os.getcwd())\nfor _ in range(700): os.mkdir('d'), os.chdir('d')"
    there = []
    with Sandbox(isolation="none", limits=SandboxLimits(seconds=30)) as sandbox:
        for _ in range(3):
            result = sandbox.run_python_now(code)
            there.append(Path(result.stdout.strip()).exists())
            assert result.outcome is CallOutcome.FINISHED
    assert any(there)
    assert not Path(result.stdout.strip()).exists()


def test_a_call_whose_supervisor_is_stopped_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LATE_SECONDS", 0.5)
    monkeypatch.setattr(process, "END_SECONDS", 0.3)
    sandbox = Sandbox(isolation="none")
    folder = sandbox.running().folder
    result = sandbox.run_python_now("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)", seconds=2.0)
    assert (result.outcome, result.detail) == (CallOutcome.LOST, "no result after 2.5 seconds")
    sandbox.close()
    assert gone(folder)
    assert not Path(folder).exists()


@pytest.mark.parametrize("isolation", [*BACKENDS, "none"])
def test_a_call_ends_when_its_caller_is_killed_although_a_fork_of_the_caller_lives(
    isolation: str, killed: list[int]
) -> None:
    needs_backend(isolation)
    program = f"{HEAD}{IN_A_CALL}" + (
        "child = os.fork()\nif child == 0:\n  os.closerange(0, 3)\n  time.sleep(60)\n"
        "print(child, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", program, isolation]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == -signal.SIGKILL, result.stderr
    folder, child = result.stdout.split()
    killed.append(int(child))
    assert gone(folder)
    assert not Path(folder).exists()


@pytest.mark.parametrize("isolation", ["landlock", "none"])
def test_the_next_start_removes_what_killed_servers_left_and_nothing_that_is_used(
    isolation: str, tmp_path: Path
) -> None:
    needs_backend(isolation)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", f"{HEAD}{IN_A_CALL}time.sleep(60)", isolation]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout is not None
        folder = trainer.stdout.readline().strip()
        deadline = time.monotonic() + 30
        while not list(Path(folder).glob("*/*")) and time.monotonic() < deadline:
            time.sleep(0.01)  # until the call has made its directory
        for pid in processes(folder):  # its server and supervisor, so that neither can clean up
            os.kill(pid, signal.SIGSTOP)
        for pid in (trainer.pid, *processes(folder)):
            os.kill(pid, signal.SIGKILL)
    assert gone(folder)
    assert [path.name for path in Path(folder).glob("*/*")] == ["d"]
    program = HEAD + (
        "used = Sandbox(isolation=sys.argv[1])\nused.open()\nother = Sandbox(isolation=sys.argv[1])\nother.open()\n"
        "print(os.path.exists(used.running().folder), used.run_python_now('print(6 * 7)').stdout.strip())"
    )
    command = [sys.executable, "-c", program, isolation]
    assert subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout == "True 42\n"
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_forks_after_its_first_call_can_go_on_calling_in_both() -> None:
    program = HEAD + (
        "import asyncio\nsandbox = Sandbox()\nprint(sandbox.run_python_now('print(1)').stdout.strip(), flush=True)\n"
        "server = sandbox.running().folder\nchild = os.fork()\nif child == 0:\n"
        "  print(sandbox.run_python_now('print(2)').stdout.strip(), sandbox.running().folder != server)\n"
        "  print(asyncio.run(sandbox.run_python('print(3)')).stdout.strip())\n  sandbox.close()\n  sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "print(sandbox.run_python_now('print(4)').stdout.strip(), sandbox.running().folder == server)"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert (result.stdout.splitlines(), result.stderr) == (["1", "2 True", "3", "4 True"], "")
