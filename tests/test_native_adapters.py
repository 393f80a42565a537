"""LoRA adapters that vLLM computes itself: exact after an optimiser step, and nothing of the former ones is cached."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from adapter_rounding import shares, take_step
from adapters import adapted_qwen3
from command import ROOT
from needs_vllm import needs_vllm
from served import LONG, ROOM, gap, save_model, together
from tiny import rows
from two_ranks import loss, micro_batches

from condensegrpo.assembly.runtime import check_sampler
from condensegrpo.config.load import find_config, load_config
from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import ConfigError, SamplerError
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.learner.engine import DeepSpeedEngine, close_deepspeed, open_deepspeed, optimizer_step
from condensegrpo.learner.lora import add_adapters
from condensegrpo.learner.model_folder import load_policy
from condensegrpo.learner.settings import LoraSettings, OptimizerSettings
from condensegrpo.learner.weights import gathered_weights
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.samplers.vllm.weights import native_rank
from condensegrpo.training.learn_step import sampled_weights

if TYPE_CHECKING:
    from condensegrpo.samplers.vllm.sampler import VllmSampler

LORA = LoraSettings(rank=4, alpha=8.0, sampler="native")
PROMPTS = ((5, 6, 7), (0, 0, 9), LONG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    save_model(path)
    return path


@pytest.fixture(scope="module")
def learner(folder: Path) -> Iterator[DeepSpeedEngine]:
    policy = add_adapters(load_policy(str(folder), dtype="float32"), LORA, base=str(folder), seed=0)
    opened = open_deepspeed(policy, zero_stage=0, optimizer=OptimizerSettings(lr=0.05), total_steps=10, dtype="float32")
    yield opened
    close_deepspeed(opened)


@pytest.fixture(scope="module")
def sampler(folder: Path, learner: DeepSpeedEngine) -> Iterator["VllmSampler"]:
    """One engine for all tests, in the learner's process group."""
    options = {"max_model_len": ROOM, "engine": {"kv_cache_gib": 0.02}}
    made: VllmSampler = build_plugin("samplers", "vllm", options, {"model_path": str(folder), "lora": LORA})
    yield made
    made.close()


def replies(sampler: "VllmSampler") -> list[Generation]:
    return together(sampler, [(prompt, SamplingParams(max_tokens=8, seed=seed)) for seed, prompt in enumerate(PROMPTS)])


def worst_gap(sampler: "VllmSampler", learner: DeepSpeedEngine) -> float:
    return max(
        gap(learner.module.policy, prompt, reply) for prompt, reply in zip(PROMPTS, replies(sampler), strict=True)
    )


@needs_vllm
def test_after_an_optimiser_step_logprobs_are_the_learners_cached_prompts_included(
    sampler: "VllmSampler", learner: DeepSpeedEngine
) -> None:
    """Without adapters, with the first ones (B = 0), and after every step, sampled and measured."""
    assert worst_gap(sampler, learner) < 1e-4
    for version in range(3):
        sampler.update(sampled_weights(sampler, learner), version)
        before = replies(sampler)[-1]  # whose prompt fills two blocks of the prefix cache
        assert worst_gap(sampler, learner) < 1e-4
        measured = asyncio.run(sampler.score(LONG, before.token_ids))
        assert list(measured) == pytest.approx(before.logprobs, abs=1e-4)
        optimizer_step(learner, micro_batches(rows(4), 2), loss)
        assert gap(learner.module.policy, LONG, before) > 0.01  # what a cache of old keys and values would show
    assert sampler.version == 2
    assert "adapters beside the base" in sampler.describe()


@needs_vllm
def test_only_adapters_are_sent_and_incomplete_ones_are_refused(
    sampler: "VllmSampler", learner: DeepSpeedEngine
) -> None:
    sampler.update(sampled_weights(sampler, learner), 3)
    sent = {name: tensor.clone() for name, tensor in sampled_weights(sampler, learner)}
    assert len(sent) == 2 * 7 * 2  # A and B of seven layers in two blocks
    for broken, fault in (
        (dict(list(sent.items())[1:]), "1 of 28 were not given"),
        ({**sent, next(iter(sent)): torch.zeros(2, 2)}, r"has the shape \(2, 2\)"),
        (dict(gathered_weights(learner)), "is no weight of its model"),
    ):
        with pytest.raises(SamplerError, match=fault):
            sampler.update(iter(broken.items()), 4)
    assert sampler.version == 3
    assert worst_gap(sampler, learner) < 1e-4


@needs_vllm
def test_asleep_the_base_is_kept_since_an_update_brings_the_adapters_alone(
    sampler: "VllmSampler", learner: DeepSpeedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that reach vLLM, which cannot sleep on a CPU."""
    vllm, calls = sampler._driver._engine._engine, []
    monkeypatch.setattr(vllm, "sleep", lambda **given: calls.append(("sleep", given)))
    monkeypatch.setattr(vllm, "wake_up", lambda tags: calls.append(("wake_up", tags)))
    monkeypatch.setattr(sampler, "_can_sleep", True)
    sampler.sleep(keep_weights=False)
    sampler.update(sampled_weights(sampler, learner), 5)
    assert calls == [("sleep", {"level": 1}), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]


def test_a_sampler_that_takes_no_adapters_gets_merged_weights(learner: DeepSpeedEngine) -> None:
    names = [name for name, _ in sampled_weights(ScriptedSampler(lambda prompt, params: (0,)), learner)]
    assert names == [name for name, _ in gathered_weights(learner)]
    assert not any("lora" in name for name in names)


def test_a_merge_in_bfloat16_loses_a_small_update_and_adapters_lose_none_of_it() -> None:
    """After one step of AdamW at lr 1e-5, which moves every entry of B by 1e-5; weights of the usual size 0.02."""
    policy = adapted_qwen3(LoraSettings(rank=16, alpha=32.0))
    take_step(policy, rate=1e-5)
    native, merged_bf16, merged_fp32 = zip(*shares(policy, scale=2.0), strict=True)
    assert max(native) < 0.01
    assert max(merged_fp32) < 0.01
    assert min(merged_bf16) > 0.8  # so merged weights are not the default in bfloat16


@pytest.mark.parametrize(
    ("lora", "dtype", "rank"),
    [
        (None, "bfloat16", None),
        (LoraSettings(rank=4), "bfloat16", 8),
        (LoraSettings(rank=64), "bfloat16", 64),
        (LoraSettings(rank=65), "bfloat16", 128),
        (LoraSettings(rank=4), "float32", None),
        (LoraSettings(rank=4, sampler="native"), "float32", 8),
        (LoraSettings(rank=4, sampler="merged"), "bfloat16", None),
        (LoraSettings(rank=1000), "bfloat16", None),
    ],
)
def test_adapters_are_native_in_bfloat16_where_vllm_has_room_for_them(
    lora: LoraSettings | None, dtype: str, rank: int | None
) -> None:
    assert native_rank(lora, dtype=dtype) == rank


def test_native_adapters_that_are_not_possible_are_an_error() -> None:
    with pytest.raises(SamplerError, match=r"largest rank is 512, and model\.lora\.rank is 1000.*sampler=merged"):
        native_rank(LoraSettings(rank=1000, sampler="native"), dtype="bfloat16")
    with pytest.raises(SamplerError, match=r"no kernels\. Set"):
        native_rank(LORA, dtype="bfloat16", unsupported=lambda: "no kernels")
    screens = ROOT / "studies/configs/screens.yaml"
    tower = load_config(screens, ["model.lora={rank: 4, sampler: native}", "model.vision=train"])
    with pytest.raises(ConfigError, match="adapters of the vision tower train too, which no sampler computes"):
        check_sampler(tower)
    merged = load_config(screens, ["model.lora={rank: 4}", "model.vision=train"]).model
    assert (merged.lora is None, merged.sampled_lora) == (False, None)
    config = load_config(find_config("quickstart"), ["model.lora={rank: 4, sampler: native}"])
    with pytest.raises(ConfigError, match="the sampler transformers takes merged weights only"):
        check_sampler(config)


@needs_vllm
def test_vllm_says_which_models_it_computes_adapters_of() -> None:
    from condensegrpo.samplers.vllm.weights import unsupported_by

    assert unsupported_by(["Qwen3ForCausalLM"]) == ""
    assert unsupported_by(["LlamaForCausalLM"]) == ""
    assert "no code of its own for NobodyForCausalLM" in unsupported_by(["NobodyForCausalLM"])
