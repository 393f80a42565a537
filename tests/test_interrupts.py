"""Ctrl-C: once leaves a run that continues, twice leaves at once, and no process stays."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import ENVIRONMENT, TINY, command, start, succeed
from runs import wait_for, wait_for_phase
from waiting import eventually

from condensegrpo.storage.run_folder import read_metrics

FOLDER = Path(__file__).parent


def descendants(pid: int) -> set[int]:
    """The processes that a process started, and those that they started."""
    parents = {int(stat.parent.name): int(stat.read_text().rpartition(")")[2].split()[1]) for stat in stats()}
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {pid}


def is_pending(number: signal.Signals, pid: int) -> bool:
    """Whether a process has not taken a signal yet."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("ShdPnd:")[2].split()[0], 16) >> (number - 1) & 1)


def stats() -> Iterator[Path]:
    return (stat for stat in Path("/proc").glob("[0-9]*/stat") if stat.exists())


def test_ctrl_c_twice_leaves_at_once_also_while_a_call_of_c_holds_the_interpreter(tmp_path: Path) -> None:
    """No Python runs any more: the first signal cannot be handled, and a second used to count as the same one."""
    reward = f"reward={{name: '{FOLDER}/holding_reward.py:Holding', options: {{begun: {tmp_path}/begun}}}}"
    settings = ("warm_start.steps=1", "evaluate.problems=1", "evaluate.samples=1", reward)
    process = start("train", *TINY, *settings, f"runs_dir={tmp_path}", "name=held")
    try:
        wait_for(tmp_path / "begun", process)
        children = descendants(process.pid)
        assert len(children) >= 4  # the sandbox's server, a supervisor, the program and its child
        process.send_signal(signal.SIGINT)
        assert eventually(lambda: not is_pending(signal.SIGINT, process.pid))  # two signals before it count as one
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=240) == -signal.SIGINT
    finally:
        process.kill()  # else it would hold a processor for as long as the machine runs
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children)), children


def test_ctrl_c_leaves_no_temporary_folder(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("play", "quickstart"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
    )
    kinds = ("play", "rollouts")  # of the tokenizer, and of what is played
    assert eventually(lambda: all([*tmp_path.glob(f"condensegrpo-{kind}-*")] for kind in kinds))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=240)
    assert process.returncode == 130
    assert [*tmp_path.glob("condensegrpo-*")] == []


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "CROSS_RANK"])
def test_a_rank_ends_with_its_launcher_however_that_ends(variable: str) -> None:
    rank = (
        "import os, time\nfrom condensegrpo.cli.process import end_with_launcher\n"
        "end_with_launcher()\nprint(os.getpid())\ntime.sleep(1000)"
    )
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, '-uc', {rank!r}])"
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**ENVIRONMENT, variable: "0"}
    )
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    launcher.kill()
    launcher.communicate(timeout=240)  # also waits until the rank has closed the pipe
    assert not Path(f"/proc/{pid}/fd/1").exists()


def test_ctrl_c_in_the_first_evaluation_leaves_a_run_that_continues(tmp_path: Path) -> None:
    settings = ("warm_start.steps=1", "train.steps=1", "evaluate.problems=16")
    process = start("train", *TINY, *settings, f"runs_dir={tmp_path}", "name=stopped")
    wait_for_phase(tmp_path / "stopped", "evaluating", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert f"stopped. To continue: condensegrpo train --resume {tmp_path / 'stopped'}" in out
    assert not (tmp_path / "stopped/trajectories/step_000001.parquet").exists()
    stale = [tmp_path / "stopped" / name for name in ("checkpoints/step_000001.tmp-7", ".config.yaml.tmp-7")]
    stale[0].mkdir()
    stale[1].touch()
    succeed("train", "--resume", str(tmp_path / "stopped"), "evaluate.problems=1")
    assert [line["step"] for line in read_metrics(tmp_path / "stopped/metrics.jsonl")] == [0, 1, 1]
    assert not any(path.exists() for path in stale)
