"""When vLLM computes LoRA adapters itself, and what a merge loses; adapters in vLLM: ``test_vllm_sampler.py``."""

import pytest
from adapter_rounding import shares, take_step
from adapters import adapted_qwen3
from command import ROOT

from condensegrpo.assembly.runtime import check_sampler
from condensegrpo.config.load import find_config, load_config
from condensegrpo.core.errors import ConfigError, SamplerError
from condensegrpo.learner.settings import LoraSettings
from condensegrpo.samplers.vllm.weights import native_rank

LORA = LoraSettings(rank=4, alpha=8.0, sampler="native")


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
