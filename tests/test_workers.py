"""Files that run in forks: no failure, crash or interrupt is lost, and nothing that was started is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

CONFTEST = """
import workers

def pytest_addoption(parser):
    parser.addoption("--workers", type=int)

def pytest_runtestloop(session):
    workers.run(session, session.config.getoption("workers"))
    return True
"""
MEETING = """
import time
from pathlib import Path

def meet(name):
    Path(name + "NUMBER").touch()
    while not all(Path(name + number).exists() for number in "01"):
        time.sleep(0.01)

def test_two_files_at_once(tmp_path):
    (tmp_path / "file").write_text("NUMBER")
    meet("written")
    assert (tmp_path / "file").read_text() == "NUMBER"
    meet("read")
"""
WAITING = """
import time
from pathlib import Path
import pytest

@pytest.fixture(scope="module", autouse=True)
def server():
    yield
    Path("stopped").touch()

def test_waits():
    Path("began").touch()
    while not Path("go").exists():
        time.sleep(0.01)

def test_after():
    Path("after").touch()
"""


def started(folder: Path, *arguments: str, **files: str) -> subprocess.Popen[str]:
    for name, text in {"conftest": CONFTEST, **files}.items():
        (folder / f"{name}.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "-um", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_failures_crashes_and_skips_are_reported_and_temporary_folders_are_apart(tmp_path: Path) -> None:
    failing = "def test_fails():\n    print('said')\n    assert 0\n"
    failing += "import pytest\ndef test_skips():\n    pytest.skip('why')\n"
    crashing = "import os\ndef test_crashes():\n    os._exit(0)\ndef test_after():\n    pass\n"
    meeting = {f"test_{number}": MEETING.replace("NUMBER", str(number)) for number in range(2)}
    files = {**meeting, "test_failing": failing, "test_last": crashing}
    process = started(tmp_path, "--workers=2", "--basetemp", str(tmp_path / "base"), **files)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "1 failed, 2 passed, 1 skipped" in out
    assert "said" in out
    assert "a worker ended with exit code 0 in test_last.py::test_crashes; 1 of 6 tests did not run" in out


def test_an_interrupt_ends_every_worker_after_its_test_and_its_fixtures(tmp_path: Path) -> None:
    process = started(tmp_path, "--workers=1", test_a=WAITING, test_b="def test_b():\n    open('after', 'w')\n")
    while not (tmp_path / "began").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert any("KeyboardInterrupt" in line for line in process.stdout)
    (tmp_path / "go").touch()
    process.communicate(timeout=60)
    assert process.returncode == 2
    assert (tmp_path / "stopped").exists()
    assert not (tmp_path / "after").exists()
