"""Runs that are killed in the middle of everything end as if nobody had touched them.

`make chaos` spends an hour (CHAOS_SECONDS), with a new seed every round, on every kind of write, stops, full and slow
disks, a long run, two ranks and vLLM. `make test` kills the run of ``test_prefetching.py``.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import command
import psutil
import pytest
from chaos import (
    ONE_RANK,
    PREFETCHING,
    TORCHRUN,
    VLLM,
    VLLM_SERVERS,
    WRITES,
    Disturbance,
    Plan,
    a_server,
    assert_same_run,
    disk,
    disturbed,
    finish,
    itself,
    kill_at,
    rank,
    refused,
    remount,
)
from needs_vllm import needs_vllm

from condensegrpo.storage.run_folder import read_metrics

SECONDS = float(os.environ.get("CHAOS_SECONDS", "0"))  # of every plan, beyond one round
SEED = int(os.environ.get("CHAOS_SEED", "0"))

pytestmark = [
    pytest.mark.skipif(not SECONDS, reason="takes long: `make chaos` runs it"),
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="watching writes needs inotify (Linux)"),
]
Undisturbed = Callable[[Plan], Path]
Target = Callable[[psutil.Process], psutil.Process]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The folder of a plan's run that nobody disturbed."""

    @cache
    def run(plan: Plan) -> Path:
        folder: Path = tmp_path_factory.mktemp("undisturbed") / "run"
        finish(plan, folder)
        return folder

    return run


def seeds() -> Iterator[int]:
    """One seed, and more for as long as ``make chaos`` wants to go on."""
    began, seed = time.monotonic(), SEED
    yield seed
    while time.monotonic() - began < SECONDS:
        seed += 1
        yield seed


@pytest.mark.parametrize("plan", [ONE_RANK, PREFETCHING], ids=lambda plan: plan.name)
def test_killed_during_every_kind_of_write(plan: Plan, undisturbed: Undisturbed, tmp_path: Path) -> None:
    for seed in seeds():
        draw, folder = random.Random(seed), tmp_path / f"{seed}/run"
        kinds = [name for name in WRITES if (plan, name) != (ONE_RANK, "prefetched batches")]
        hits = {name: disturbed(plan, folder, kill_at(name, draw)) for name in kinds}
        finish(plan, folder)
        print(f"{plan.name}, seed {seed}: kill -9 during {', '.join(name for name, hit in hits.items() if hit)}")
        assert_same_run(undisturbed(plan), folder)
        assert all(hits.values()), hits


def test_stopped_in_every_phase(undisturbed: Undisturbed, tmp_path: Path) -> None:
    for seed in seeds():
        draw, folder = random.Random(seed), tmp_path / f"{seed}/run"
        for name in ("warm start", "trajectories", "credit", "metrics", "checkpoint"):
            disturbed(PREFETCHING, folder, replace(kill_at(name, draw), signal=signal.SIGTERM))
        finish(PREFETCHING, folder)
        assert_same_run(undisturbed(PREFETCHING), folder)


def test_a_full_disk_stops_a_run_with_advice_and_space_continues_it(undisturbed: Undisturbed, tmp_path: Path) -> None:
    kilobytes = 40
    with disk(tmp_path / "disk", kilobytes) as folder:
        while refusal := refused(ONE_RANK, folder / "run"):
            assert "free some space" in refusal.lower()
            assert "Traceback" not in refusal
            remount(folder, f"size={(kilobytes := kilobytes + 2600)}k")
        assert kilobytes > 5000  # it filled up more than once
        assert_same_run(undisturbed(ONE_RANK), folder / "run")


def test_a_read_only_disk_is_an_error_that_changes_nothing(undisturbed: Undisturbed, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 16384) as folder:
        assert disturbed(PREFETCHING, folder / "run", kill_at("published checkpoint", random.Random(SEED)))
        remount(folder, "ro")
        refusal = refused(PREFETCHING, folder / "run")
        assert "Read-only file system" in refusal
        assert "Traceback" not in refusal
        remount(folder, "rw")
        finish(PREFETCHING, folder / "run")
        assert_same_run(undisturbed(PREFETCHING), folder / "run")


def test_a_slow_disk_changes_nothing(undisturbed: Undisturbed, tmp_path: Path) -> None:
    slow = Plan("prefetching on a slow disk", (*PREFETCHING.settings, "trackers=[{name: tests/slow_disk.py:SlowDisk}]"))
    disturbed(slow, tmp_path / "run", kill_at("weights", random.Random(SEED)))
    finish(slow, tmp_path / "run")
    assert_same_run(undisturbed(PREFETCHING), tmp_path / "run")


@pytest.mark.parametrize("target", [itself, rank(0), rank(1)], ids=["launcher", "rank 0", "rank 1"])
def test_killed_launchers_and_ranks(target: Target, undisturbed: Undisturbed, tmp_path: Path) -> None:
    for seed in seeds():
        draw, folder = random.Random(seed), tmp_path / f"{seed}/run"
        for name in ("warm start", "trajectories", "checkpoint", "published checkpoint"):
            disturbed(TORCHRUN, folder, replace(kill_at(name, draw), target=target))
        finish(TORCHRUN, folder)
        assert_same_run(undisturbed(TORCHRUN), folder)


@needs_vllm
@pytest.mark.parametrize("plan", [VLLM, VLLM_SERVERS], ids=lambda plan: plan.name)
def test_killed_while_vllm_samples(plan: Plan, tmp_path: Path) -> None:
    """What vLLM samples depends on what it batches, so that no equal run is promised; that it ends is."""
    memory = set(Path("/dev/shm").glob("condensegrpo-*"))
    draw, folder = random.Random(SEED), tmp_path / "run"
    for name in ("trajectories", "weights"):
        assert disturbed(plan, folder, kill_at(name, draw))
    finish(plan, folder)
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert set(Path("/dev/shm").glob("condensegrpo-*")) <= memory


@needs_vllm
def test_a_run_whose_vllm_server_dies_ends_and_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed = Disturbance("a server", WRITES["trajectories"], target=a_server)
    assert disturbed(VLLM_SERVERS, folder, killed)
    finish(VLLM_SERVERS, folder)
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line] == [1, 2, 3, 4, 5, 6]


def test_a_long_run_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident memory, descriptors, threads and temporary files, from a fifth of the way on."""
    steps = 500
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(command, "ENVIRONMENT", {**command.ENVIRONMENT, "TMPDIR": str(temporary)})
    sizes = ("train.samples_per_problem=2", "evaluate.problems=4")
    soak = Plan(
        "soak",
        (*PREFETCHING.settings, *sizes, f"train.steps={steps}", "train.eval_every=10", "train.save_every=10"),
    )
    process = soak.start(tmp_path / "run")
    early, late = [], []  # of resident memory, descriptors, threads and temporary files
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            taken = (tmp_path / "run/metrics.jsonl").read_text().count('"trajectories"')
            now = psutil.Process(process.pid)
            files = sum(1 for _ in temporary.rglob("*"))
            measured = (now.memory_info().rss, now.num_fds(), now.num_threads(), files)
            if steps // 5 < taken < steps:  # the report at the end imports more
                (early if taken < steps // 2 else late).append(measured)
        time.sleep(0.05)
    out, err = process.communicate()
    assert process.returncode == 0, out[-2000:] + err[-4000:]
    before, after = (list(map(median, zip(*values, strict=True))) for values in (early, late))
    print(f"{steps} steps, memory, descriptors, threads, temporary files: {before}, later {after}")
    assert all(now <= then * 1.03 for then, now in zip(before, after, strict=True))
