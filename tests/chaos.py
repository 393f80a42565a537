"""Runs that are killed, stopped or starved of disk, resumed until they end, and compared with one that was left alone.

`from chaos import ONE_RANK, WRITES, assert_same_run, disturbed, finish, kill_at`
"""

import json
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest
import torch
from command import TINY, start
from forked import ForkedCommand
from inotify import Writes
from runs import TWO_RANKS, undisturbed
from safetensors.torch import load_file

from condensegrpo.storage.run_folder import read_metrics

STEPS = 6
Running = subprocess.Popen[str] | ForkedCommand


@dataclass(frozen=True)
class Plan:
    """A run of six short steps that learn something, and how it is launched."""

    name: str
    settings: tuple[str, ...] = ()
    launcher: tuple[str, ...] | None = None

    def start(self, folder: Path) -> Running:
        """Begin the run in a folder, or continue it there."""
        if (folder / "config.yaml").is_file():
            return start("train", "--resume", str(folder), launcher=self.launcher)
        assert not folder.exists() or not any(folder.iterdir()), f"{folder} has no configuration to resume with"
        shutil.rmtree(folder, ignore_errors=True)
        # it takes more than a second, after which it saves checkpoints
        slow = ("warm_start.steps=240", "warm_start.turns_per_step=16")
        sizes = ("train.problems_per_step=2", f"train.steps={STEPS}", "train.keep_checkpoints=2")
        settings = (*TINY, *slow, *sizes, *self.settings)
        return start("train", *settings, f"runs_dir={folder.parent}", f"name={folder.name}", launcher=self.launcher)


ONE_RANK = Plan("one rank")
PREFETCHING = Plan(
    "prefetching",
    ("rollout.staleness=1", "algorithm={advantage: {estimator: grpo}, importance: {cap: 2}}"),
)
TORCHRUN = Plan("two ranks", ("learner.zero_stage=2",), TWO_RANKS)
LEARNS = (  # in every step, whatever vLLM samples
    "model.new.layers=2",
    "warm_start={steps: 30, turns_per_step: 64, probe_target: null}",
    "train.problems_per_step=4",
)
VLLM = Plan("vllm", ("sampler.name=vllm", *LEARNS), ("-m",))
VLLM_SERVERS = Plan("vllm servers", ("sampler.name=vllm_server", *LEARNS), ("-m",))

# what a run writes, by a pattern of its path in the run folder, in the order of a run
WRITES: Mapping[str, str] = {
    "new model": r"origin/.*new.*",
    "warm start": r"origin/\.?(warm|round).*",
    "checkpoint of the warm start": r"origin/\.warm-checkpoints/.*",
    "trajectories": r"trajectories/.*",
    "credit": r"credit/.*",
    "metrics": r"metrics\.jsonl",
    "checkpoint": r"checkpoints/step_\d+\.tmp-\d+(/.*)?",
    "published checkpoint": r"checkpoints/step_\d+",
    "prefetched batches": r"checkpoints/step_\d+\.tmp-\d+/ahead.*",
    "weights": r"checkpoints/step_\d+\.tmp-\d+/model.*",
    "trajectories after a checkpoint": r"trajectories/.*",
    "report": r"\.?report\..*",
}


def itself(process: psutil.Process) -> psutil.Process:
    """The process that was started."""
    return process


def rank(number: int) -> Callable[[psutil.Process], psutil.Process]:
    """A rank of a launcher."""

    def target(launcher: psutil.Process) -> psutil.Process:
        ranks = [process for process in launcher.children() if "condensegrpo" in process.cmdline()]
        return ranks[number] if number < len(ranks) else launcher

    return target


def a_server(process: psutil.Process) -> psutil.Process:
    """A vLLM server of a run."""
    return next(child for child in process.children() if "--watched" in child.cmdline())


@dataclass(frozen=True)
class Disturbance:
    """A signal to a process of the run, so many seconds after a path that matches was written."""

    name: str
    path: str  # a regular expression of the path below the run's folder
    delay: float = 0.0
    signal: int = signal.SIGKILL
    target: Callable[[psutil.Process], psutil.Process] = itself


def kill_at(name: str, draw: random.Random) -> Disturbance:
    """A kill −9 during one of the writes of this name."""
    return Disturbance(name, WRITES[name], delay=draw.choice((0, 0, 0.0003, 0.002)))


def disturbed(plan: Plan, folder: Path, disturbance: Disturbance) -> bool:
    """Run or resume until the disturbance ends the process; False if the run ended before.

    No descendant of the process may be left soon after.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with Writes(folder.parent) as writes:
        process = plan.start(folder)
        hit = _wait(process, writes, re.compile(f"{re.escape(folder.name)}/({disturbance.path})"))
        time.sleep(disturbance.delay if hit else 0)
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        if process.poll() is None:
            disturbance.target(psutil.Process(process.pid)).send_signal(disturbance.signal)
        out, err = process.communicate(timeout=120)
    _, alive = psutil.wait_procs(family, timeout=30)
    for orphan in alive:
        orphan.kill()
    assert not alive, f"{disturbance}: left behind {alive}"
    assert process.returncode in (0, 1, -disturbance.signal, 130, 143), out[-2000:] + err[-4000:]
    return process.returncode != 0


def _wait(process: Running, writes: Writes, path: re.Pattern[str]) -> bool:
    """Wait for a write of a path; whether it came before the process ended."""
    deadline = time.monotonic() + 240
    while process.poll() is None:
        assert time.monotonic() < deadline, f"no end within 240 s, waiting for {path.pattern}"
        if any(map(path.fullmatch, writes.read(0.1))):
            return True
    return False


def finish(plan: Plan, folder: Path) -> None:
    """Run or resume to the end, with nothing in the way."""
    process = plan.start(folder)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out[-2000:] + err[-4000:]


def refused(plan: Plan, folder: Path) -> str:
    """Run or resume; what it wrote to standard error if it failed, else nothing."""
    process = plan.start(folder)
    _, err = process.communicate(timeout=240)
    return err if process.returncode else ""


@contextmanager
def disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of this size, mounted at a new folder."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk must be mounted for this test: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, option: str) -> None:
    """Change an option of a mounted file system: ``ro``, ``rw``, ``size=…``."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True)


def assert_same_run(run: Path, other: Path) -> None:
    """Last weights, optimiser, random states, all trajectories, credit and metrics are equal, and nothing is left over.

    Which older checkpoints a run keeps depends on where it was stopped.
    """
    names, others = _files(run), _files(other)
    assert names ^ others == set()
    for kind in ("trajectories", "credit"):
        for step in range(1, STEPS + 1):
            path = f"{kind}/step_{step:06d}.parquet"
            assert _lines(run / path) == _lines(other / path), path
    lines, other_lines = (map(undisturbed, read_metrics(folder / "metrics.jsonl")) for folder in (run, other))
    assert list(lines) == list(other_lines)
    for name in sorted(names):
        if name.endswith((".pt", ".safetensors")):
            load: Callable[[Path], object] = load_file if name.endswith("safetensors") else _load
            assert _equal(load(run / name), load(other / name)), name


def _files(run: Path) -> set[str]:
    """All files of a run but those of older checkpoints."""
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    return {name for name in names if not re.match(rf"checkpoints/step_(?!{STEPS:06d}/)\d+/", name)}


def _lines(path: Path) -> list[str]:
    """The rows of a file, without what the clock says."""
    return [json.dumps(_without_clock(row), sort_keys=True) for row in pyarrow.parquet.read_table(path).to_pylist()]


def _without_clock(value: object) -> object:
    if isinstance(value, dict):
        here = ("model",)  # names the folder of the run
        return {key: _without_clock(item) for key, item in value.items() if "seconds" not in key and key not in here}
    return [_without_clock(item) for item in value] if isinstance(value, list) else value


def _load(path: Path) -> object:
    return torch.load(path, weights_only=False)  # DeepSpeed's files hold classes of its own


def _equal(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(value, other)
    if isinstance(value, Mapping):
        return (
            isinstance(other, Mapping)
            and value.keys() == other.keys()
            and all(_equal(item, other[key]) for key, item in value.items())
        )
    if isinstance(value, list | tuple):
        return isinstance(other, list | tuple) and len(value) == len(other) and all(map(_equal, value, other))
    return type(value) is type(other) and (value == other or not isinstance(value, int | float | str | bool))
