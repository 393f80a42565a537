"""Optimiser and weights in the machine's memory: what DeepSpeed is told, and that the steps stay the same."""

from pathlib import Path

import pytest
import torch
from adapters import moved_qwen3
from tiny import qwen3, rows
from two_ranks import OPTIMISER, loss, micro_batches

from condensegrpo.config.checks import check_figures
from condensegrpo.config.load import find_config, load_config
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner import checkpoint
from condensegrpo.learner.engine import (
    DeepSpeedEngine,
    Offload,
    close_engine,
    deepspeed_settings,
    open_engine,
    optimizer_step,
)
from condensegrpo.learner.weights import gathered

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
    zero = deepspeed_settings(3, "float32", offload, grad_clip=1.0, elements=100, trained=7)["zero_optimization"]
    assert {key: value for key, value in zero.items() if key.startswith("offload")} == wanted
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (7, 100)  # only gradients are reduced


@pytest.mark.parametrize(
    ("offload", "stage"),
    [("optimiser", 1), ("optimiser", 2), ("optimiser", 3), ("optimiser_and_weights", 3)],
)
@pytest.mark.parametrize("make", [qwen3, moved_qwen3], ids=["all weights", "adapters"])
def test_steps_with_offload_are_those_without(make: type, offload: Offload, stage: int) -> None:
    found = []
    for where in ("none", offload):
        engine = open_engine(
            make(), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32", offload=where
        )
        stats = [optimizer_step(engine, micro_batches(rows(5, seed=step), 2), loss) for step in range(3)]
        found.append((stats, {name: tensor.clone() for name, tensor in gathered(engine)}))
        close_engine(engine)
    (stats, weights), (offloaded_stats, offloaded) = found
    assert [one["grad_norm"] for one in offloaded_stats] == pytest.approx([one["grad_norm"] for one in stats], rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(offloaded[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("offload", "stage"), [("optimiser", 2), ("optimiser_and_weights", 3)])
def test_resume_with_offload_continues_bit_equal(tmp_path: Path, offload: Offload, stage: int) -> None:
    def opened(seed: int) -> DeepSpeedEngine:
        return open_engine(
            qwen3(seed), zero_stage=stage, optimizer=OPTIMISER, total_steps=10, dtype="float32", offload=offload
        )

    batches = [micro_batches(rows(5, seed=step), 2) for step in range(4)]
    first = opened(0)
    for some in batches[:2]:
        optimizer_step(first, some, loss)
    path = checkpoint.save(first, tmp_path, step=2, state={})
    wanted = [optimizer_step(first, some, loss) for some in batches[2:]]
    close_engine(first)
    second = opened(7)
    checkpoint.load(second, path)
    assert [optimizer_step(second, some, loss) for some in batches[2:]] == wanted
    close_engine(second)


@pytest.mark.parametrize(("offload", "stage", "least"), [("optimiser", 0, 1), ("optimiser_and_weights", 2, 3)])
def test_offload_that_the_stage_does_not_share_out_is_refused(offload: str, stage: int, least: int) -> None:
    with pytest.raises(ConfigError) as caught:
        check_figures(quickstart(f"learner.offload.training={offload}", f"learner.zero_stage={stage}"))
    assert f"learner.offload.training: found {offload}, and learner.zero_stage is {stage}" in str(caught.value)
    assert f"Set learner.zero_stage={least}, or learner.offload.training=none" in str(caught.value)


def test_offload_that_the_stage_shares_out_is_fine() -> None:
    check_figures(quickstart("learner.offload.training=none"))
    check_figures(quickstart("learner.offload.training=optimiser", "learner.zero_stage=1"))
    check_figures(quickstart("learner.offload.training=optimiser_and_weights", "learner.zero_stage=3"))


def test_with_adapters_there_is_no_reference_to_offload() -> None:
    with pytest.raises(ConfigError, match=r"learner\.offload\.reference: found true, and model\.lora is set"):
        check_figures(quickstart("learner.offload.reference=true", "model.lora.rank=4"))
