"""How a process learns its rank and its device; tasks of srun as ranks, on two nodes that share one folder."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from command import ENVIRONMENT, ROOT, TINY
from forked import ForkedCommand
from runs import wait_for

from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.learner import checkpoint, ranks
from condensegrpo.learner.launchers import check_alone, device_index, first_host, join_launch
from condensegrpo.storage.run_folder import RunFolder, read_metrics

STEP = {  # of the second task on the second of two nodes with two tasks each
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}


def joined(variables: dict[str, str]) -> dict[str, str]:
    """What is added to the variables."""
    after = dict(variables)
    join_launch(after)
    return {name: value for name, value in after.items() if variables.get(name) != value}


@pytest.mark.parametrize(
    ("nodelist", "wanted"),
    [
        ("localhost", "localhost"),
        ("node[001-003,7]", "node001"),
        ("gpu[9-11],login,a-b[2]", "gpu9"),
        ("a-b[2],gpu[9-11],login", "a-b2"),
        ("rack[1-2]n[08-09]-ib,x", "rack1n08-ib"),
        ("login,gpu[9-11]", "login"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, wanted: str) -> None:
    assert first_host(nodelist) == wanted


def test_a_task_of_srun_is_a_rank() -> None:
    wanted = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "gpu08", "MASTER_PORT": "26041"}
    assert joined(STEP) == wanted
    assert joined({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}) == {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"
    }  # fmt: skip


def test_a_rank_of_torchrun_in_a_task_of_srun_stays_that() -> None:
    assert joined({**STEP, "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}) == {}


def test_a_batch_script_and_an_interactive_shell_are_single_processes() -> None:
    assert joined({name: value for name, value in STEP.items() if "STEP" not in name}) == {}
    assert joined({**STEP, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}) == {}
    assert joined({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"}) == {}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_SIZE=8 and no RANK"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2 and no RANK"),
        ({**STEP, "SLURM_LOCALID": ""}, "srun started 4 tasks.*ValueError"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "srun started 2 tasks.*SLURM_JOB_NODELIST"),
    ],
)
def test_several_processes_of_unknown_rank_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*torchrun"):
        join_launch(dict(variables))


def test_train_is_refused_before_several_processes_make_a_folder_each(tmp_path: Path) -> None:
    more = {"OMPI_COMM_WORLD_SIZE": "2"}
    process = ForkedCommand(("train", *TINY, f"runs_dir={tmp_path}"), cwd=ROOT, environment=ENVIRONMENT, more=more)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "mpirun started 2 processes" in err
    assert not list(tmp_path.iterdir())


def test_a_process_takes_the_only_device_that_it_sees_or_that_of_its_local_rank() -> None:
    assert [device_index(rank, 8) for rank in range(8)] == list(range(8))
    assert device_index(3, 1) == 0  # srun --gpus-per-task=1
    assert device_index(3, 0) == 3  # on a CPU
    with pytest.raises(ConfigError, match=r"local rank 2: this process sees 2 devices.*--nproc_per_node 2"):
        device_index(2, 2)


def test_deepspeed_and_vllm_read_the_index_of_the_only_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert (ranks.choose_device(), os.environ["LOCAL_RANK"]) == (0, "0")


def test_a_rank_may_get_sigterm_twice_and_still_saves() -> None:
    """SLURM signals every process of a step, and a torchrun among them passes its signal on."""
    program = (
        "import os, signal\nfrom condensegrpo.cli.process import StopRequest\n"
        "stop = StopRequest()\nassert not stop.requested()\n"
        "for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGTERM): os.kill(os.getpid(), number)\n"
        "assert stop.requested()\nos.kill(os.getpid(), signal.SIGTERM)\nprint('saved')\n"
        "os.kill(os.getpid(), signal.SIGINT)"
    )
    ranks = ({"RANK": "0"}, {"SLURM_STEP_ID": "1"})  # the second: the only task of its step
    for rank, code, out in (({}, -signal.SIGTERM, ""), *((rank, -signal.SIGINT, "saved\n") for rank in ranks)):
        done = subprocess.run(
            [sys.executable, "-uc", program], env={**ENVIRONMENT, **rank}, capture_output=True, text=True, timeout=240,
            check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (code, out), done.stderr


@contextmanager
def tasks(folder: Path, step: int, *arguments: Sequence[str]) -> Iterator[list[ForkedCommand]]:
    """The tasks of a step that srun starts with these arguments of ``train``, each on a node of its own."""
    both = [_task(folder, step, rank, own) for rank, own in enumerate(arguments)]
    try:
        yield both
    finally:
        for process in both:
            process.kill()


def ended(processes: list[ForkedCommand], code: int) -> list[str]:
    """What processes that end with this exit code wrote to standard error."""
    errors = []
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert process.returncode == code, out + err
        errors.append(err)
    return errors


def _task(folder: Path, step: int, rank: int, arguments: Sequence[str]) -> ForkedCommand:
    """A task with its own working folder and TMPDIR."""
    node = folder / f"node{rank}"
    node.mkdir(exist_ok=True)
    more = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": str(step),
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "TMPDIR": str(node),
    }
    return ForkedCommand(("train", *arguments), cwd=node, environment=ENVIRONMENT, more=more)


def test_srun_trains_on_two_nodes_and_scancel_leaves_a_run_that_continues(tmp_path: Path) -> None:
    settings = ("warm_start.steps=1", "train.steps=50", "evaluate.problems=1", "learner.zero_stage=2", "name=two")
    run = tmp_path / "node0/runs/two"
    with tasks(tmp_path, 0, *2 * [(*TINY, *settings, "runs_dir=runs")]) as both:
        wait_for(run / "trajectories/step_000001.parquet", both[0])
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGTERM):
            for process in both:
                process.send_signal(number)
        ended(both, 143)
    last = max(checkpoint.steps(run / "checkpoints"))
    with tasks(tmp_path, 1, *2 * [("--resume", str(run), f"train.steps={last + 1}")]) as both:
        ended(both, 0)
    steps = [line["step"] for line in read_metrics(run / "metrics.jsonl") if "seconds/rollout" in line]
    assert steps == list(range(1, last + 2))
    assert not list((tmp_path / "node1").glob("runs*"))


@pytest.mark.parametrize("several", [{"RANK": "1", "WORLD_SIZE": "2"}, {"OMPI_COMM_WORLD_SIZE": "2"}])
def test_an_evaluation_is_one_process(several: dict[str, str]) -> None:
    check_alone({})
    check_alone({"RANK": "0", "WORLD_SIZE": "1"})
    with pytest.raises(ConfigError, match=r"2 processes"):
        check_alone(dict(several))


def test_nodes_without_a_shared_file_system_are_refused(tmp_path: Path) -> None:
    """The path of the run folder names another folder on each node."""
    own = "/proc/self/cwd/runs"
    (tmp_path / "node1/runs/run").mkdir(parents=True)
    with tasks(tmp_path, 2, (*TINY, f"runs_dir={own}"), TINY) as both:
        error, other = ended(both, 1)
    assert "error: checking the run folder" in other
    assert f"checking the run folder {own}/quickstart: rank 1 on " in error
    assert "Set runs_dir to such a folder" in error
    assert not list((tmp_path / "node0/runs/quickstart").glob(".shared*"))


def test_nodes_with_different_configurations_are_refused(tmp_path: Path) -> None:
    with tasks(tmp_path, 3, (*TINY, "seed=0"), (*TINY, "seed=1", "runs_dir=elsewhere")) as both:
        error, other = ended(both, 2)
    assert "error: comparing the configurations" in other
    assert "comparing the configurations of the ranks: on rank 1 (" in error
    assert "seed is 0 on rank 0 and 1 here. Start every rank with the same arguments" in error
    assert list((tmp_path / "node0/runs").iterdir()) == []  # a start that is refused leaves no folder


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(RunError, match=r"Function not implemented.*no file locks.*Set runs_dir"),
        RunFolder(tmp_path).locked(),
    ):
        pass
