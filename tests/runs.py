"""What a run's folder holds, and how two runs compare: `from runs import sampled, assert_equal_runs`."""

import shutil
import subprocess
import time
from pathlib import Path

import torch
from command import succeed, succeed_on_two_ranks
from forked import ForkedCommand
from safetensors.torch import load_file

from condensegrpo.storage.run_folder import read_metrics
from condensegrpo.storage.trajectories import read_trajectories

TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m")


def weights(run_folder: Path, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(run_folder / f"checkpoints/step_{step:06d}/model/model.safetensors")
    return found


def sampled(run_folder: Path, step: int) -> dict[str, list[tuple[int, ...]]]:
    """What every trajectory of a step sampled, by its id."""
    read = read_trajectories(run_folder / f"trajectories/step_{step:06d}.parquet")
    return {one.trajectory.id: [turn.output_ids for turn in one.trajectory.turns] for one in read}


def undisturbed(line: dict[str, float]) -> dict[str, float]:
    """A line of metrics without what the clock says."""
    return {key: value for key, value in line.items() if "seconds" not in key}


def assert_equal_runs(one: Path, other: Path, *, steps: tuple[int, ...] = (3, 4)) -> None:
    """Two runs sampled in these steps, the last of all, learned and logged the same, bit for bit."""
    for step in steps:
        assert sampled(one, step) == sampled(other, step)
    first, second = weights(one, steps[-1]), weights(other, steps[-1])
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    lines, others = read_metrics(one / "metrics.jsonl"), read_metrics(other / "metrics.jsonl")
    assert [undisturbed(line) for line in lines] == [undisturbed(line) for line in others]


def wait_for(path: Path, process: "subprocess.Popen[str] | ForkedCommand", seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} did not appear within {seconds} s"
        time.sleep(0.02)


def wait_for_phase(
    folder: Path, title: str, process: "subprocess.Popen[str] | ForkedCommand", seconds: float = 200
) -> None:
    """Wait until a run says in its log.txt that a phase began."""
    deadline = time.monotonic() + seconds
    while not (folder / "log.txt").exists() or title not in (folder / "log.txt").read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{title!r} did not begin within {seconds} s"
        time.sleep(0.02)


def wait_for_error(text: str, process: ForkedCommand, seconds: float = 200) -> None:
    """Wait until a command has written something to standard error: two signals before it count as one."""
    deadline = time.monotonic() + seconds
    while text not in process.errors():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, process.errors()
        time.sleep(0.02)


def from_the_start_of(finished: Path, folder: Path, *changes: str) -> tuple[str, ...]:
    """The arguments of a run in a new folder that starts where another one did, after its warm start."""
    shutil.copytree(finished / "origin", folder / "origin")
    (folder / "config.yaml").write_text((finished / "config.yaml").read_text())
    for name in ("trajectories", "credit", "checkpoints"):
        (folder / name).mkdir()
    return ("train", "--resume", str(folder), "--allow-changes", *changes)


def one_step(finished: Path, folder: Path, *changes: str, ranks: int = 1) -> None:
    """The first step of a run that starts where another one did, on one rank or two."""
    arguments = from_the_start_of(finished, folder, "train.steps=1", *changes)
    if ranks == 1:
        succeed(*arguments)
    else:
        succeed_on_two_ranks(*arguments)


def first_update(run_folder: Path) -> dict[str, float]:
    """The metrics of the first step, without what the clock says and what hangs on which rows a rank has."""
    lines = read_metrics(run_folder / "metrics.jsonl")
    first = undisturbed(next(line for line in lines if line["step"] == 1 and "loss" in line))
    return {key: value for key, value in first.items() if key != "tokens/computed"}
