"""Optimiser and weights in the machine's memory: what DeepSpeed is told, and that the steps stay the same."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from adapters import moved_qwen3
from command import TINY, succeed
from tiny import qwen3, rows
from transformers import PreTrainedModel
from two_ranks import OPTIMISER, loss, micro_batches

from condensegrpo.config.checks import check_values
from condensegrpo.config.load import find_config, load_config
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError, LearnerError
from condensegrpo.learner import checkpoint
from condensegrpo.learner.devices import DTYPES
from condensegrpo.learner.engine import (
    DeepSpeedEngine,
    Offload,
    close_deepspeed,
    deepspeed_settings,
    open_deepspeed,
    optimizer_step,
)
from condensegrpo.learner.settings import Dtype
from condensegrpo.learner.training_state import on_device, to_main_memory
from condensegrpo.learner.weights import gathered_weights
from condensegrpo.storage.run_folder import read_metrics

Make = Callable[[], PreTrainedModel]
WHERE = {"device": "cpu", "pin_memory": torch.accelerator.is_available()}


def quickstart(*overrides: str) -> RunConfig:
    return load_config(find_config("quickstart"), overrides)


@pytest.mark.parametrize(
    ("offload", "wanted"),
    [
        ("none", {}),
        ("optimiser", {"offload_optimizer": WHERE}),
        ("optimiser_and_weights", {"offload_optimizer": WHERE, "offload_param": WHERE}),
    ],
)
def test_deepspeed_settings_say_what_to_offload(offload: Offload, wanted: dict[str, object]) -> None:
    zero = deepspeed_settings(3, "float32", offload, grad_clip=1.0, elements=100, trainable=7)["zero_optimization"]
    assert {key: value for key, value in zero.items() if key.startswith("offload")} == wanted
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (7, 100)  # only gradients are reduced


@pytest.mark.parametrize(
    ("make", "offload", "stage"),
    [
        (moved_qwen3, "optimiser", 2),
        (qwen3, "optimiser", 3),
        (moved_qwen3, "optimiser_and_weights", 3),
    ],
)
def test_steps_with_offload_are_those_without(make: Make, offload: Offload, stage: int) -> None:
    norms, weights = without_offload(make)
    offloaded_norms, offloaded = two_steps(make, stage, offload)
    assert offloaded_norms == pytest.approx(norms, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(offloaded[name], tensor, rtol=1e-5, atol=1e-6)


@cache
def without_offload(make: Make) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What every stage gives on one rank."""
    return two_steps(make, 0, "none")


def two_steps(make: Make, stage: int, offload: Offload) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The norms of the gradients, and the weights afterwards."""
    engine = open_deepspeed(
        make(), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32", offload=offload
    )
    norms = [optimizer_step(engine, micro_batches(rows(5, seed=step), 2), loss)["grad_norm"] for step in range(2)]
    weights = {name: tensor.clone() for name, tensor in gathered_weights(engine)}
    close_deepspeed(engine)
    return norms, weights


@pytest.mark.parametrize(("offload", "stage"), [("optimiser", 2), ("optimiser_and_weights", 3)])
def test_resume_with_offload_continues_bit_equal(tmp_path: Path, offload: Offload, stage: int) -> None:
    def opened(seed: int) -> DeepSpeedEngine:
        return open_deepspeed(
            qwen3(seed), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32", offload=offload
        )

    batches = [micro_batches(rows(5, seed=step), 2) for step in range(4)]
    first = opened(0)
    for some in batches[:2]:
        optimizer_step(first, some, loss)
    path = checkpoint.save(first, tmp_path, step=2, state={})
    wanted = [optimizer_step(first, some, loss) for some in batches[2:]]
    close_deepspeed(first)
    second = opened(7)
    checkpoint.load_checkpoint(second, path)
    assert [optimizer_step(second, some, loss) for some in batches[2:]] == wanted
    close_deepspeed(second)


@pytest.mark.parametrize(
    ("make", "stage", "dtype"),
    [
        (qwen3, 0, "float32"),
        (moved_qwen3, 1, "float32"),
        (qwen3, 2, "bfloat16"),
        (qwen3, 3, "bfloat16"),
    ],
)
def test_steps_are_bit_equal_though_the_state_leaves_between_them(
    make: Make, stage: int, dtype: Dtype, tmp_path: Path
) -> None:
    """A checkpoint is saved while it is away, as a run does, and loaded by an engine whose state is there."""
    batches = [micro_batches(rows(5, seed=step), 2) for step in range(3)]

    def opened() -> DeepSpeedEngine:
        policy = make().to(DTYPES[dtype])
        return open_deepspeed(policy, zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype=dtype)

    def weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in gathered_weights(engine)}

    staying, leaving, resumed = opened(), opened(), opened()
    wanted = [optimizer_step(staying, some, loss) for some in batches]
    found = []
    to_main_memory(leaving)
    for step, some in enumerate(batches):
        with on_device(leaving):
            found.append(optimizer_step(leaving, some, loss))
        if step == 1:
            path = checkpoint.save(leaving, tmp_path, step=2, state={})
    checkpoint.load_checkpoint(resumed, path)
    to_main_memory(resumed)
    for some in batches[2:]:
        with on_device(resumed):
            optimizer_step(resumed, some, loss)
    assert found == wanted
    for engine in (leaving, resumed):
        assert all(torch.equal(weights(staying)[name], tensor) for name, tensor in weights(engine).items())
    for engine in (staying, leaving, resumed):
        close_deepspeed(engine)


def test_the_state_leaves_after_a_failed_step_too() -> None:
    engine = open_deepspeed(qwen3(), zero_stage=2, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    to_main_memory(engine)
    away = set(engine.optimizer.offloaded_states)
    assert away
    with pytest.raises(LearnerError, match="no rank has a micro-batch"), on_device(engine):
        optimizer_step(engine, [], loss)
    assert engine.optimizer.offloaded_states == away
    close_deepspeed(engine)


@pytest.mark.parametrize(("offload", "stage", "least"), [("optimiser", 0, 1), ("optimiser_and_weights", 2, 3)])
def test_offload_that_the_stage_does_not_share_out_is_refused(offload: str, stage: int, least: int) -> None:
    with pytest.raises(ConfigError) as caught:
        check_values(quickstart(f"learner.offload.training={offload}", f"learner.zero_stage={stage}"))
    assert f"learner.offload.training: found {offload}, and learner.zero_stage is {stage}" in str(caught.value)
    assert f"Set learner.zero_stage={least}, or learner.offload.training=none" in str(caught.value)


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        ("learner.offload.training=optimiser", "learner.offload.training is optimiser, which keeps the state"),
        ("rollout.staleness=1", "rollout.staleness is 1: the sampler then samples while the learner works"),
    ],
)
def test_a_state_that_cannot_leave_during_rollouts_is_refused(other: str, wanted: str) -> None:
    changes = ("learner.zero_stage=1", "algorithm.importance.cap=2", "learner.offload.rollouts=true")
    with pytest.raises(ConfigError, match=f"learner.offload.rollouts: found true, and {wanted}"):
        check_values(quickstart(*changes, other))
    check_values(quickstart(*changes))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_state_that_deepspeed_cannot_move_in_bfloat16_is_refused(stage: int) -> None:
    """Its optimiser is another below stage 2 (a run ended with an AttributeError after the model was loaded)."""
    engine = open_deepspeed(qwen3().bfloat16(), zero_stage=stage, optimizer=OPTIMISER, total_steps=1, dtype="bfloat16")
    with pytest.raises(AttributeError):  # if this fails, DeepSpeed has learned it, and the check can go
        to_main_memory(engine)
    close_deepspeed(engine)
    changes = ("learner.offload.rollouts=true", "model.dtype=bfloat16", "algorithm.importance.cap=2")
    with pytest.raises(ConfigError, match=rf"zero_stage is {stage} in bfloat16.*Set learner.zero_stage=2"):
        check_values(quickstart(*changes, f"learner.zero_stage={stage}"))
    check_values(quickstart(*changes, "learner.zero_stage=2"))


def test_offload_that_the_stage_shares_out_is_fine() -> None:
    check_values(quickstart("learner.offload.training=none"))
    check_values(quickstart("learner.offload.training=optimiser", "learner.zero_stage=1"))
    check_values(quickstart("learner.offload.training=optimiser_and_weights", "learner.zero_stage=3"))


def test_with_adapters_there_is_no_reference_to_offload() -> None:
    with pytest.raises(ConfigError, match=r"learner\.offload\.reference: found true, and model\.lora is set"):
        check_values(quickstart("learner.offload.reference=true", "model.lora.rank=4"))


def test_a_run_moves_its_state_out_for_the_sampler_and_back_to_learn(tmp_path: Path) -> None:
    """Sampler and state never need the device at once; the run is bit-equal to that of a state that stays."""
    log, losses = tmp_path / "log", []
    sampler = f"sampler={{name: tests/sharing_sampler.py:SharingSampler, options: {{log: {log}}}}}"
    for rollouts in ("true", "false"):
        succeed(
            "train",
            *TINY,
            sampler,
            "reward={name: tests/sharing_sampler.py:Alternating, options: {}}",
            "learner.zero_stage=1",
            "warm_start.steps=0",
            "train.steps=2",
            "train.eval_every=0",
            f"learner.offload.rollouts={rollouts}",
            f"runs_dir={tmp_path}",
            f"name=rollouts-{rollouts}",
        )
        lines = read_metrics(tmp_path / f"rollouts-{rollouts}/metrics.jsonl")
        losses.append([line["loss"] for line in lines if "loss" in line])
        if rollouts == "true":
            events = log.read_text().split("\n")[:-1]
    step = ["sample", "sleep", "reload_states", "step", "offload_states", "update"]
    assert events == ["sleep", "offload_states", "update", *step, *step, "sample"]  # at last the evaluation
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
