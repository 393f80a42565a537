import errno
import fcntl
import hashlib
import json
import os
import pickle
import random
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
import torch
import two_ranks
from command import ENVIRONMENT, succeed_on_two_ranks
from forked import ForkedCommand
from safetensors.torch import load_file
from tiny import qwen3, rows, tokenizer
from two_ranks import FEWER, MINUTES, MORE, OPTIMISER, flip_bit, loss, micro_batches, steps_of

from condensegrpo.core.errors import CheckpointError
from condensegrpo.learner import checkpoint, devices
from condensegrpo.learner.engine import (
    STAGES,
    DeepSpeedEngine,
    close_deepspeed,
    learning_rate,
    open_deepspeed,
    optimizer_step,
)
from condensegrpo.learner.model_folder import in_main_memory, write_policy
from condensegrpo.learner.settings import Dtype, OptimizerSettings
from condensegrpo.learner.training_state import restore_training_state, training_state
from condensegrpo.learner.weights import gathered_weights
from condensegrpo.storage.files import is_locked, shared_lock

HERE = Path(__file__).parent
COSINE = OptimizerSettings(lr=0.01, weight_decay=0.1, grad_clip=0.05, warmup_steps=2, schedule="cosine")


pytestmark = pytest.mark.usefixtures("one_thread")


def engine(stage: int = 0, *, seed: int = 0) -> DeepSpeedEngine:
    return open_deepspeed(qwen3(seed), zero_stage=stage, optimizer=COSINE, total_steps=8, dtype="float32")


def steps(learner: DeepSpeedEngine, numbers: range) -> list[tuple[float, float, float]]:
    """Steps whose rows come from torch's and Python's generators; learning rate, loss and gradient norm of each."""
    seen = []
    for _ in numbers:
        seed = random.randrange(1000) + int(torch.randint(1000, ()))
        stats = optimizer_step(learner, micro_batches(rows(5, seed=seed), 2), loss)
        seen.append((stats["lr"], stats["loss"], stats["grad_norm"]))
    return seen


def weights(learner: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in gathered_weights(learner)}


def saved(folder: Path, *numbers: int) -> Path:
    """Checkpoints of one engine under some step numbers; the last one's folder."""
    learner = engine()
    path = folder
    for number in numbers:
        path = checkpoint.save(learner, folder, step=number, state={"cursor": number})
    close_deepspeed(learner)
    return path


def scenario(name: str, folder: Path) -> ForkedCommand:
    return ForkedCommand((name, str(folder)), cwd=HERE, environment=ENVIRONMENT, program=two_ranks.main)


@pytest.mark.parametrize("stage", STAGES)
def test_resume_continues_bit_equal_with_weights_rate_and_random_numbers(tmp_path: Path, stage: int) -> None:
    random.seed(5)
    torch.manual_seed(5)
    whole = engine(stage)
    steps(whole, range(2))
    checkpoint.save(whole, tmp_path, step=2, state={"cursor": 2})
    wanted = steps(whole, range(2, 4))
    wanted_weights = weights(whole)
    close_deepspeed(whole)

    random.seed(99)
    torch.manual_seed(99)
    resumed = engine(stage, seed=7)
    newest = checkpoint.latest(tmp_path)
    assert newest == tmp_path / "step_000002"
    assert checkpoint.load_checkpoint(resumed, newest) == {"cursor": 2}
    assert steps(resumed, range(2, 4)) == wanted
    found = weights(resumed)
    close_deepspeed(resumed)
    assert [name for name, tensor in found.items() if not torch.equal(tensor, wanted_weights[name])] == []


@pytest.mark.parametrize("stage", [0, 3])
def test_a_resumed_engine_goes_on_with_its_own_rate_decay_and_betas(tmp_path: Path, stage: int) -> None:
    """Before, a lower learner.optimiser.lr at a resume was taken and changed nothing."""
    first = engine(stage)
    steps(first, range(3))
    path = checkpoint.save(first, tmp_path, step=3, state={})
    close_deepspeed(first)
    calmer = replace(COSINE, lr=0.001, weight_decay=0.5, betas=(0.8, 0.9))
    second = open_deepspeed(qwen3(), zero_stage=stage, optimizer=calmer, total_steps=8, dtype="float32")
    checkpoint.load_checkpoint(second, path)
    before = weights(second)
    rates = [rate for rate, _, _ in steps(second, range(3, 5))]
    moved = max(float((tensor - before[name]).abs().max()) for name, tensor in weights(second).items())
    (group,) = second.optimizer.param_groups
    close_deepspeed(second)
    assert rates == [learning_rate(calmer, step, total_steps=8) for step in (3, 4)]
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.8, 0.9))
    assert 0 < moved < 0.004  # AdamW moves a weight by about the rate, and by its decay


def test_in_bfloat16_opening_and_resuming_print_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed prints a dozen lines on memory there."""
    for made in range(2):
        learner = open_deepspeed(qwen3(), zero_stage=0, optimizer=COSINE, total_steps=8, dtype="bfloat16")
        if made:
            checkpoint.load_checkpoint(learner, tmp_path / "step_000001")
        optimizer_step(learner, micro_batches(rows(2), 2), loss)
        checkpoint.save(learner, tmp_path, step=1, state={})
        close_deepspeed(learner)
    assert capsys.readouterr().out == ""


class Gpus:
    """As many devices as generators; calls without a device use the current one, as torch's do."""

    def __init__(self, generators: int, *, current: int, fill: int) -> None:
        self.states = [torch.tensor([fill + device], dtype=torch.uint8) for device in range(generators)]
        self.current = current

    def is_available(self) -> bool:
        return True

    def get_rng_state(self) -> torch.Tensor:
        return self.states[self.current]

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.states[self.current] = state


def test_a_rank_stores_the_generator_of_its_device_and_resumes_on_another_number_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 of four on one machine, then the one visible device of a task (``--gpus-per-task=1``), then of two."""
    learner = engine()
    monkeypatch.setattr(devices, "gpu", Gpus(4, current=2, fill=50))
    path = checkpoint.save(learner, tmp_path, step=1, state={})
    for count, current in ((1, 0), (2, 1)):
        fewer = Gpus(count, current=current, fill=0)
        monkeypatch.setattr(devices, "gpu", fewer)
        checkpoint.load_checkpoint(learner, path)
        assert [int(state) for state in fewer.states] == [*range(current), 52]
    close_deepspeed(learner)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of one ``torchrun`` did, after this process saved checkpoints for them to take up."""
    folder = tmp_path_factory.mktemp("ranks")
    for stage in (1, 3):
        first = open_deepspeed(qwen3(), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32")
        steps_of(first, range(2))
        checkpoint.save(first, folder / MORE.format(stage), step=2, state={})
        close_deepspeed(first)
    names = "saved_and_resumed,resharded,saved_in_background,fails_on_one_rank,late"
    succeed_on_two_ranks(names, str(folder), program=two_ranks.main)
    return folder


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, torch.Tensor]:
    """The weights after four steps of one rank that nothing interrupted."""
    learner = open_deepspeed(qwen3(), zero_stage=0, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    weights = steps_of(learner, range(4))
    close_deepspeed(learner)
    return weights


def assert_near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)


def test_resume_on_two_ranks_continues_bit_equal(ranks: Path) -> None:
    for rank in range(2):
        whole, halves, state = torch.load(ranks / f"resumed_rank{rank}.pt")
        assert state == {"cursor": 2}
        assert [name for name, tensor in whole.items() if not torch.equal(tensor, halves[name])] == []
    manifest = checkpoint.verify(ranks / "checkpoints" / "step_000002")
    assert [name for name in manifest.hashes if name.startswith("rng_")] == ["rng_rank_0.pt", "rng_rank_1.pt"]
    assert "late_rank_1.txt" in manifest.hashes  # the first rank waits for whatever the others still write


@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_go_on_from_what_one_saved(ranks: Path, undisturbed: dict[str, torch.Tensor], stage: int) -> None:
    for rank in range(2):
        assert_near(torch.load(ranks / f"more_stage{stage}_rank{rank}.pt"), undisturbed)


@pytest.mark.parametrize(("stage", "to"), [(1, 1), (3, 3), (3, 0), (1, 2)])
def test_one_rank_goes_on_from_what_two_saved_under_any_stage(
    ranks: Path, undisturbed: dict[str, torch.Tensor], stage: int, to: int
) -> None:
    """Weights, moments and the place in the schedule are the same; gradients are added up in another order."""
    learner = open_deepspeed(qwen3(seed=9), zero_stage=to, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    checkpoint.load_checkpoint(learner, ranks / FEWER.format(stage) / "step_000002")
    found = steps_of(learner, range(2, 4))
    close_deepspeed(learner)
    assert_near(found, undisturbed)


@pytest.mark.parametrize(("dtype", "stages"), [("float32", (0, 1, 3, 2)), ("bfloat16", (1, 2, 3, 1))])
def test_on_one_rank_another_zero_stage_continues_bit_equal(
    tmp_path: Path, dtype: Dtype, stages: tuple[int, ...]
) -> None:
    """DeepSpeed has another optimiser for each of these; in bfloat16 the weights are those of its fp32 copies."""
    path: Path | None = None
    for step, stage in enumerate(stages):
        learner = open_deepspeed(qwen3(step), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype=dtype)
        if path is not None:
            saved = torch.load(path / "train_rank_0.pt", weights_only=True)
            checkpoint.load_checkpoint(learner, path)
            again = training_state(learner)
            assert (again["steps"], again["scheduled"]) == (saved["steps"], saved["scheduled"]) == (step, step)
            assert again["pieces"].keys() == saved["pieces"].keys()
            for name, (_, tensors) in again["pieces"].items():
                assert all(torch.equal(tensors[key], saved["pieces"][name][1][key]) for key in tensors), name
            weights = {name: tensor.flatten() for name, tensor in gathered_weights(learner)}
            masters = {name: tensors["weight"] for name, (_, tensors) in saved["pieces"].items()}
            assert all(torch.equal(weights[name], masters[name].to(weights[name].dtype)) for name in masters)
        steps_of(learner, range(step, step + 1))
        path = checkpoint.save(learner, tmp_path, step=step + 1, state={})
        close_deepspeed(learner)


def test_a_checkpoint_in_the_background_is_that_of_the_step_it_was_begun_after(ranks: Path) -> None:
    for rank in range(2):
        beside, again = torch.load(ranks / f"background_rank{rank}.pt")
        assert [name for name, tensor in beside.items() if not torch.equal(tensor, again[name])] == []
    assert "late_rank_1.txt" in checkpoint.verify(ranks / "background/step_000002").hashes


def test_every_rank_says_that_one_of_them_could_not_write(ranks: Path) -> None:
    """The first waited for the second for ever."""
    first, second = ((ranks / f"error_rank{rank}.txt").read_text() for rank in range(2))
    assert first == second
    assert "No space left on device" in first
    assert [*(ranks / "failed").iterdir()] == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("damaged", "train_rank_1.pt its SHA-256 begins"),
        ("too_long", "a micro-batch may hold 3. Rows are never split"),
    ],
)
def test_every_rank_says_what_the_first_one_found(ranks: Path, fault: str, message: str) -> None:
    """The others waited for it for ever."""
    first, second = ((ranks / f"{fault}_rank{rank}.txt").read_text() for rank in range(2))
    assert first == second
    assert message in first


def test_a_rank_may_be_later_than_the_limit_of_the_groups_for_gradients(ranks: Path) -> None:
    for rank in range(2):
        others, limits, gathered_values, sums = torch.load(ranks / f"late_rank{rank}.pt")
        assert others > 1  # groups that DeepSpeed made after that of all ranks
        assert limits == {MINUTES}
        assert (gathered_values, sums) == ([0, 1], (3.0, 0.5))


def test_killed_while_saving_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    process = scenario("dies_while_saving", tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "stalled").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    checkpoints = tmp_path / "checkpoints"
    assert any(path.name.startswith("step_000002.tmp-") for path in checkpoints.iterdir())
    newest = checkpoint.latest(checkpoints)
    assert newest == checkpoints / "step_000001"
    assert checkpoint.verify(newest).step == 1
    checkpoint.prune(checkpoints, keep=2)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_000001"]


def test_full_disk_leaves_the_last_good_checkpoint_and_no_debris(tmp_path: Path) -> None:
    assert scenario("runs_out_of_disk", tmp_path).wait(timeout=120) == 0
    checkpoints = tmp_path / "checkpoints"
    assert (tmp_path / "error.txt").read_text().startswith("CheckpointError: writing ")
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_000001"]
    assert checkpoint.latest(checkpoints) == checkpoints / "step_000001"


def test_a_disk_that_is_full_while_extra_writes_says_what_to_do(tmp_path: Path) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    learner = engine()
    checkpoint.save(learner, tmp_path, step=1, state={})
    with pytest.raises(CheckpointError, match=r"No space left on device.*disk or quota is full: free some space"):
        checkpoint.save(learner, tmp_path, step=2, state={}, extra=full)
    close_deepspeed(learner)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001"]


def test_a_flipped_bit_is_found_and_its_file_named(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    victim = path / "train_rank_0.pt"
    flip_bit(victim)
    assert checkpoint.latest(tmp_path) == path  # the sizes are right
    learner = engine()
    with pytest.raises(CheckpointError, match=rf"{victim.name} its SHA-256 begins"):
        checkpoint.load_checkpoint(learner, path)
    close_deepspeed(learner)


@pytest.mark.parametrize("key", ["weight", "exp_avg_sq"])
def test_a_state_that_is_not_finite_is_refused(key: str) -> None:
    learner = engine()
    steps(learner, range(1))
    state = training_state(learner)
    name, (_, values) = next(iter(state["pieces"].items()))
    values[key] = values[key].clone()
    values[key][0] = torch.nan
    try:
        with pytest.raises(CheckpointError, match=rf"loading {key} of {re.escape(name)} .*NaN or infinite"):
            restore_training_state(learner, [state])
    finally:
        close_deepspeed(learner)


def test_a_pickle_that_the_manifest_vouches_for_is_not_executed(tmp_path: Path) -> None:
    """Whoever writes the file can write its hash: torch refuses it, and its advice to allow it is not passed on."""
    path = saved(tmp_path, 1)
    file = path / "train_rank_0.pt"
    file.write_bytes(pickle.dumps(Path("/")))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sizes"][file.name] = file.stat().st_size
    manifest["hashes"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    learner = engine()
    with pytest.raises(CheckpointError, match=r"train_rank_0.pt is no file of tensors") as caught:
        checkpoint.load_checkpoint(learner, path)
    assert "weights_only" not in str(caught.value)
    close_deepspeed(learner)


def test_a_missing_or_short_file_is_found_and_named(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state.json has 1 bytes, wanted 13"):
        checkpoint.latest(tmp_path)
    (path / "rng_rank_0.pt").unlink()
    with pytest.raises(CheckpointError, match=r"rng_rank_0.pt is missing"):
        checkpoint.verify(path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read"):
        checkpoint.verify(path)


def test_prune_leaves_a_checkpoint_that_a_process_reads(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    with shared_lock(tmp_path / "step_000001" / "manifest.json"):
        checkpoint.prune(tmp_path, keep=1)
        assert list(checkpoint.steps(tmp_path)) == [1, 2]
    checkpoint.prune(tmp_path, keep=1)
    assert list(checkpoint.steps(tmp_path)) == [2]


def test_a_reader_is_noticed_where_a_file_that_is_open_for_reading_takes_no_exclusive_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, see flock(2): a checkpoint in use was pruned there."""
    locked = fcntl.flock

    def flock(file: IO[bytes], kind: int) -> None:
        if kind & fcntl.LOCK_EX and not file.writable():
            raise OSError(errno.EBADF, "Bad file descriptor")
        locked(file, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / "manifest.json").touch()
    with shared_lock(tmp_path / "manifest.json"):
        assert is_locked(tmp_path / "manifest.json")
    assert not is_locked(tmp_path / "manifest.json")


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 0}))
    with pytest.raises(CheckpointError, match="found format 0, wanted 1"):
        checkpoint.verify(path)


def test_without_checkpoints_there_is_no_latest(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "none") is None
    checkpoint.prune(tmp_path / "none", keep=1)


def test_prune_removes_what_killed_saves_left_and_nothing_else(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 10)
    (tmp_path / "step_000003.tmp-17").mkdir()
    (tmp_path / "notes.txt").touch()
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step_000002", "step_000010"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000010"


@pytest.mark.parametrize(
    ("steps_there", "keep", "kept"),
    [
        ((5, 10, 12), 2, (10, 12)),
        ((5, 10, 12), 9, (5, 10, 12)),
        ((5, 10, 12), 0, (12,)),
        ((999999, 1000000), 1, (1000000,)),  # by number, not by name
    ],
)
def test_prune_keeps_the_newest(tmp_path: Path, steps_there: tuple[int, ...], keep: int, kept: tuple[int, ...]) -> None:
    for step in steps_there:
        (tmp_path / f"step_{step:06d}").mkdir()
    checkpoint.prune(tmp_path, keep=keep)
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("step_*")) == list(kept)


def test_what_a_process_of_the_same_id_left_is_not_published(tmp_path: Path) -> None:
    stale = tmp_path / f"step_000001.tmp-{os.getpid()}"
    stale.mkdir()
    (stale / "rng_rank_7.pt").touch()
    path = saved(tmp_path, 1)
    assert not (path / "rng_rank_7.pt").exists()
    assert "rng_rank_7.pt" not in checkpoint.verify(path).hashes


def test_an_old_folder_that_a_process_of_the_same_id_left_is_no_obstacle(tmp_path: Path) -> None:
    learner = engine()
    checkpoint.save(learner, tmp_path, step=1, state={"try": 1})
    old = tmp_path / f"step_000001.tmp-old-{os.getpid()}"
    old.mkdir()
    (old / "state.json").touch()
    path = checkpoint.save(learner, tmp_path, step=1, state={"try": 2})
    assert checkpoint.load_checkpoint(learner, path) == {"try": 2}
    close_deepspeed(learner)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["step_000001"]


def test_a_leftover_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / f"step_000001.tmp-{os.getpid()}"
    link.symlink_to(tmp_path / "elsewhere")  # which is not followed when folders are removed
    with pytest.raises(CheckpointError, match=rf"removing .*{link.name}, which an interrupted process left: OSError"):
        saved(tmp_path, 1)


def test_the_manifest_covers_every_file_and_extra_ones_too(tmp_path: Path) -> None:
    learner = engine()

    def export(folder: Path) -> None:
        write_policy(
            folder / "model",
            learner.module.config,
            in_main_memory(gathered_weights(learner)),
            tokenizer=tokenizer(),
        )

    path = checkpoint.save(learner, tmp_path, step=4, state={"cursor": [1, None, "x"]}, extra=export)
    close_deepspeed(learner)
    manifest = checkpoint.verify(path)
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {"manifest.json"}
    assert manifest.hashes.keys() == manifest.sizes.keys() == files
    assert "model/model.safetensors" in files
    assert len({file.stat().st_mode for file in path.rglob("*") if file.is_file()}) == 1  # as the umask has it
    assert (manifest.step, manifest.world_size, manifest.zero_stage) == (4, 1, 0)
    assert json.loads((path / "state.json").read_text()) == {"cursor": [1, None, "x"]}
    assert torch.equal(load_file(path / "model/model.safetensors")["model.norm.weight"], torch.ones(16))
