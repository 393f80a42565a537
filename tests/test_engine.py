import math
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import two_ranks
from command import succeed_on_two_ranks
from packed import collate, trained_logprobs
from tiny import forking_rows, llama, plain_logprobs, qwen3, rows, segment, surrogate_step
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel
from two_ranks import (
    OPTIMISER,
    SHARED_ROWS,
    SPLITS,
    STEPS,
    at_once,
    loss,
    micro_batches,
    steps_of_shared_rows,
    train,
)

from condensegrpo.algorithms.objective import ObjectiveFunction, ObjectiveValue, PerToken, supervised
from condensegrpo.algorithms.packing import PackedBatch, blocks
from condensegrpo.algorithms.packing import micro_batches as micro_batches_of
from condensegrpo.core.errors import ConfigError, LearnerError
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner import head as fused_head
from condensegrpo.learner.engine import STAGES, close_deepspeed, learning_rate, open_deepspeed, optimizer_step
from condensegrpo.learner.ranks import rank, sum_over_ranks, world_size
from condensegrpo.learner.settings import OptimizerSettings
from condensegrpo.learner.weights import gathered_weights

HERE = Path(__file__).parent


pytestmark = pytest.mark.usefixtures("one_thread")


def plain(
    steps: Sequence[Sequence[Segment]], model: PreTrainedModel, temperature: float = 0.9
) -> tuple[dict[str, Tensor], list[float]]:
    """The reference: torch's own AdamW on all rows at once, clipping and schedule by hand; weights and norms."""
    adamw = AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    norms = []
    for step, some in enumerate(steps):
        adamw.param_groups[0]["lr"] = (0.005, 0.01)[step]  # warm-up of two steps to 0.01
        batch = collate(some)
        logp_T = trained_logprobs(model, batch, temperature=temperature)
        surrogate_step(logp_T, batch).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        adamw.step()
        adamw.zero_grad()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}, norms


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("stage", "objective"), [(0, at_once), (1, loss), (2, loss), (3, loss), (3, at_once)])
def test_every_zero_stage_equals_plain_torch(stage: int, objective: ObjectiveFunction) -> None:
    steps = [rows(6, seed=step) for step in range(STEPS)]
    wanted, norms = plain(steps, qwen3())
    found, stats = train(stage, [micro_batches(some, 2) for some in steps], objective)
    assert_same(found, wanted)
    assert [one["grad_norm"] for one in stats] == pytest.approx(norms, rel=1e-5)
    assert min(norms) < 0.05 < max(norms)  # one step is clipped, another is not
    assert [one["lr"] for one in stats] == pytest.approx([0.005, 0.01])


@pytest.mark.parametrize("stage", [0, 2])  # two ranks below: 1 and 3
def test_shared_prefixes_under_every_zero_stage_equal_plain_torch(stage: int) -> None:
    steps = [forking_rows(16, seed=step) for step in range(STEPS)]
    wanted, norms = plain(steps, qwen3())
    packed = [micro_batches_of(blocks(some, max_tokens=30, share=True), max_tokens=30) for some in steps]
    found, stats = train(stage, packed)
    assert min(map(len, packed)) > 1
    assert_same(found, wanted)
    assert [one["grad_norm"] for one in stats] == pytest.approx(norms, rel=1e-5)


def test_gradient_accumulation_the_same_rows_in_any_micro_batches_are_one_step() -> None:
    some = rows(16)
    wanted, _ = plain([some], qwen3())
    shuffled = random.Random(1).sample(some, 16)
    for split in (micro_batches(some, 16), micro_batches(some, 4), micro_batches(some, 1), micro_batches(shuffled, 5)):
        found, (stats,) = train(1, [split])
        assert_same(found, wanted)
        assert stats["tokens"] == sum(row.trained for row in some)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two real processes found, in all scenarios of one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    names = "uneven,shared_out,chunks,one_rank_fails,checkpointed,shared_rows"
    succeed_on_two_ranks(names, str(folder), program=two_ranks.main)
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_on_which_every_trajectory_fails_stops_the_run_on_all_ranks(ranks: Path, rank: int) -> None:
    """They would train on the rest, and nobody would notice the broken device."""
    error = (ranks / f"failed_rank{rank}.txt").read_text()
    assert error.startswith("all 2 trajectories of rank 1 failed, 2 of them like this: ")


@pytest.mark.parametrize(("split", "stage"), SPLITS)
def test_uneven_rows_on_two_ranks_equal_plain_torch_on_all_of_them(ranks: Path, split: str, stage: int) -> None:
    wanted, norms = plain([rows(3, seed=step) for step in range(STEPS)], qwen3())
    results = [torch.load(ranks / f"{split}_stage{stage}_rank{rank}.pt") for rank in range(2)]
    for found, stats in results:
        assert_same(found, wanted)
        assert [one["grad_norm"] for one in stats] == pytest.approx(norms, rel=1e-5)
    assert results[0][1] == results[1][1]  # metrics are over all ranks


def test_two_ranks_in_bfloat16_hold_the_same_weights_near_plain_torch(ranks: Path) -> None:
    _, norms = plain([rows(3, seed=step) for step in range(STEPS)], qwen3())
    (first, stats), (second, others) = (torch.load(ranks / f"bfloat16_rank{rank}.pt") for rank in range(2))
    assert [one["grad_norm"] for one in stats] == pytest.approx(norms, rel=0.05)
    assert stats == others
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_shared_prefixes_shared_out_over_two_ranks_equal_plain_torch_on_all_rows(ranks: Path, stage: int) -> None:
    steps = [forking_rows(24, seed=step) for step in range(STEPS)]
    wanted, norms = plain(steps, qwen3())
    results = [torch.load(ranks / f"shared_stage{stage}_rank{number}.pt") for number in range(2)]
    for found, stats, _ in results:
        assert_same(found, wanted)
        assert [one["grad_norm"] for one in stats] == pytest.approx(norms, rel=1e-5)
        assert [one["tokens"] for one in stats] == [sum(row.trained for row in some) for some in steps]
    for some, first, second in zip(steps, results[0][2], results[1][2], strict=True):
        assert first + second < sum(len(row.token_ids) for row in some)  # prefixes were shared
        assert abs(first - second) <= max(len(row.token_ids) for row in some)  # 22 rows and 2 became equal shares


@pytest.mark.parametrize(("policy", "shared"), [("full", 8), ("adapters", 0)])
def test_two_ranks_with_checkpointed_activations_take_the_same_steps_to_the_bit(
    ranks: Path, policy: str, shared: int
) -> None:
    """Under ZeRO 3 the projections of both layers are gathered for their second pass; the adapters have dropout."""
    for number in range(2):
        (stats, wanted, shared_without), (stats_with, found, shared_with) = torch.load(
            ranks / f"checkpointed_{policy}_rank{number}.pt"
        )
        assert stats_with == stats
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        assert shared_with == shared_without == shared


@pytest.mark.parametrize("name", SHARED_ROWS)
def test_two_ranks_that_share_every_row_equal_one(ranks: Path, name: str) -> None:
    make, stage, objective = SHARED_ROWS[name]
    wanted, stats, logps = steps_of_shared_rows(make(), stage, objective, together=1)
    for number in range(2):
        found, shared_stats, shared_logps = torch.load(ranks / f"{name}_rank{number}.pt")
        assert found.keys() == wanted.keys()
        for weight, tensor in wanted.items():
            torch.testing.assert_close(found[weight], tensor, rtol=1e-5, atol=1e-6)
        for shared, alone in zip(shared_logps, logps, strict=True):
            torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5)
        for shared, alone in zip(shared_stats, stats, strict=True):
            assert shared == pytest.approx(alone, rel=1e-5, abs=1e-7)


def test_each_of_two_ranks_keeps_half_of_the_activations(ranks: Path) -> None:
    """Masks and indices are those of all tokens on both."""
    for number in range(2):
        alone, together = torch.load(ranks / f"bytes_rank{number}.pt")
        assert 0.5 * alone < together < 0.55 * alone


@pytest.mark.parametrize("way", ["chunks", "tiles"])
def test_zero_3_ranks_with_different_numbers_of_head_chunks_or_tiles_do_not_hang(ranks: Path, way: str) -> None:
    (first, stats), (second, _) = (torch.load(ranks / f"{way}_rank{number}.pt") for number in range(2))
    model, some = llama(), [*rows(40), rows(41)[40]]
    assert sum(row.trained for row in some[:40]) > 2 * fused_head.CPU_TILE
    wanted, (norm,) = plain([some], model, temperature=1.0)
    assert_same(first, wanted)
    assert_same(second, wanted)
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_metrics_are_means_over_trained_tokens() -> None:
    some = [segment([3, 4, 5], [1, 2], weight=0.25), segment([6, 7], [1], weight=0.5)]
    logp_T = torch.cat([plain_logprobs(qwen3(), row) for row in some]).detach()
    engine = open_deepspeed(qwen3(), zero_stage=0, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    stats = optimizer_step(engine, micro_batches(some, 1), loss)
    close_deepspeed(engine)
    assert stats["tokens"] == 3
    assert stats["ratio"] == pytest.approx(float(logp_T.exp().mean()), rel=1e-5)
    assert stats["ratio_max"] == pytest.approx(float(logp_T.exp().max()), rel=1e-5)
    ratio_T = (logp_T + 1.0).exp()  # the KL term, with the same weights here, is ¼ of it
    loss_T = torch.tensor([0.25, 0.25, 0.5]) * ratio_T
    assert stats["loss"] == pytest.approx(float(-0.75 * loss_T.sum()), rel=1e-5)
    assert stats["kl_loss"] == pytest.approx(float(0.25 * loss_T.sum()), rel=1e-5)  # a sum, no mean


def test_learning_rate_by_hand() -> None:
    warm = OptimizerSettings(lr=0.4, warmup_steps=4, schedule="cosine")
    values = [learning_rate(warm, step, total_steps=8) for step in range(10)]
    half = 0.2 * math.cos(math.pi / 4)
    assert values == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.2 + half, 0.2, 0.2 - half, 0.0, 0.0], abs=1e-9)
    assert [learning_rate(OptimizerSettings(lr=0.4), step, total_steps=2) for step in range(4)] == [0.4] * 4


def test_scheduler_steps_once_per_optimiser_step_whatever_the_micro_batches() -> None:
    cosine = OptimizerSettings(lr=0.1, schedule="cosine")
    engine = open_deepspeed(qwen3(), zero_stage=2, optimizer=cosine, total_steps=4, dtype="float32")
    seen = [optimizer_step(engine, micro_batches(rows(6), size), loss)["lr"] for size in (1, 6, 2)]
    close_deepspeed(engine)
    assert seen == pytest.approx([0.1, 0.05 + 0.05 * math.cos(math.pi / 4), 0.05])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_that_is_not_finite_leaves_the_weights_untouched(stage: int) -> None:
    engine = open_deepspeed(qwen3(), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    before = {name: tensor.clone() for name, tensor in gathered_weights(engine)}
    bad = collate([segment([3, 4, 5], [1], weight=math.nan)])
    with pytest.raises(LearnerError, match="the loss is nan"):
        optimizer_step(engine, [bad], supervised)
    assert all(torch.equal(tensor, before[name]) for name, tensor in gathered_weights(engine))
    close_deepspeed(engine)


def endless(logp_T: Tensor, _: PackedBatch) -> ObjectiveValue:
    """√0 = 0, with slope ∞."""
    return ObjectiveValue((logp_T - logp_T.detach()).sqrt(), {})


@pytest.mark.parametrize(
    ("stage", "steep"), [(0, endless), (1, PerToken(endless)), (2, endless), (3, PerToken(endless))]
)
def test_a_gradient_that_is_not_finite_leaves_the_weights_untouched(stage: int, steep: ObjectiveFunction) -> None:
    engine = open_deepspeed(qwen3(), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    before = {name: tensor.clone() for name, tensor in gathered_weights(engine)}
    batch = collate([segment([3, 4, 5], [1])])
    with pytest.raises(LearnerError, match=r"the gradient norm is (nan|inf)"):
        optimizer_step(engine, [batch], steep)
    assert all(torch.equal(tensor, before[name]) for name, tensor in gathered_weights(engine))
    close_deepspeed(engine)


def test_zero_3_leaves_no_linear_layer_that_cannot_be_compiled_behind() -> None:
    """DeepSpeed replaces torch's linear function in the whole process, and a layer compiled with it fails."""
    linear = torch.nn.functional.linear
    engine = open_deepspeed(qwen3(), zero_stage=3, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    close_deepspeed(engine)
    assert torch.nn.functional.linear is linear


def test_a_step_without_any_micro_batch_is_refused() -> None:
    engine = open_deepspeed(qwen3(), zero_stage=0, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    with pytest.raises(LearnerError, match="no rank has a micro-batch"):
        optimizer_step(engine, [], loss)
    close_deepspeed(engine)


def test_rows_without_trained_tokens_add_nothing() -> None:
    some, idle = rows(3), segment([3, 4, 5], [])
    wanted, _ = plain([some], qwen3())
    found, (stats,) = train(2, [micro_batches([*some, idle], 1)])
    assert_same(found, wanted)
    assert stats["tokens"] == sum(row.trained for row in some)


def test_an_unknown_zero_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ZeRO stage 4: wanted one of \(0, 1, 2, 3\)"):
        open_deepspeed(qwen3(), zero_stage=4, optimizer=OPTIMISER, total_steps=10, dtype="float32")


def test_bf16_zero_0_gradients_are_neither_scaled_nor_kept() -> None:
    """Steps in bfloat16 stay near those in fp32: nothing divides the gradient, nothing carries it over."""
    steps = [rows(6, seed=step) for step in range(STEPS)]
    _, norms = plain(steps, qwen3())
    for stage in STAGES:
        model = qwen3().to(torch.bfloat16)
        engine = open_deepspeed(model, zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="bfloat16")
        found = [optimizer_step(engine, micro_batches(some, 2), loss, temperature=0.9) for some in steps]
        assert {tensor.dtype for _, tensor in gathered_weights(engine)} == {torch.bfloat16}
        close_deepspeed(engine)
        assert [one["grad_norm"] for one in found] == pytest.approx(norms, rel=0.1)


def test_sums_over_a_group_of_one_are_the_values() -> None:
    assert sum_over_ranks([1.5, -2.0]) == (1.5, -2.0)
    assert (rank(), world_size()) == (0, 1)


IMPORTED = (  # the third under ZeRO 3, with torch's compiler
    "import condensegrpo.learner.engine; from two_ranks import train, micro_batches; from tiny import rows; "
    "import deepspeed.runtime.zero.muon.muon_optimizer"
)
TRAIN = "[train(stage, [micro_batches(rows(2), 1)]) for stage in (0, 3)]"
JOINED = (  # as a sampler makes a group that comes before the learner
    "from torch import distributed; "
    "distributed.init_process_group(store=distributed.HashStore(), rank=0, world_size=1); "
)


def test_no_compiler_is_needed_and_the_console_stays_quiet(tmp_path: Path) -> None:
    """Alone, and in a group that is there: the second process is a fork, so that the libraries load once."""
    code = f"import os, sys; {IMPORTED}; child = os.fork(); exec({TRAIN!r} if child else {JOINED + TRAIN!r})"
    code += "; sys.exit(os.waitpid(child, 0)[1] if child else 0)"
    environment = {"PATH": "", "PYTHONPATH": str(HERE), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
