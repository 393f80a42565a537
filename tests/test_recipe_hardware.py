"""Every shipped recipe fits the hardware that its header names, and Qwen3-8B with LoRA one 80 GiB card, by ``plan``."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hub_models import SIZES, write_config

from condensegrpo.config.checks import check_values
from condensegrpo.config.load import config_on, find_config, shipped, vary
from condensegrpo.config.schema import ModelSettings, RunConfig
from condensegrpo.planning.plan import Architecture, Device, Plan, architecture
from condensegrpo.planning.remedies import lines, remedy

GIB = 1 << 30
HEADER = re.compile(r"^# Hardware: (?:(\d+) × (\d+) GiB GPU|CPU with (\d+) GiB)(?: with (.+))?$", re.MULTILINE)


class Hardware(NamedTuple):
    """What the header of a recipe names."""

    ranks: int
    device: Device
    memory: int  # bytes of each device
    overrides: tuple[str, ...]


def hardware(name: str) -> list[Hardware]:
    """The lines ``# Hardware: 8 × 80 GiB GPU``, ``# Hardware: CPU with 4 GiB``, perhaps ``with KEY=VALUE …``."""
    return [
        Hardware(int(count or 1), "gpu" if count else "cpu", int(size or main) * GIB, tuple(overrides.split()))
        for count, size, main, overrides in HEADER.findall(find_config(name).read_text(encoding="utf-8"))
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def planned(name: str, overrides: Sequence[str], models: Path, on: Hardware) -> tuple[RunConfig, Plan]:
    """On that hardware, with the published sizes of the model."""
    config = config_on(on.device, name, overrides)
    path = [] if config.model.path is None else [f"model.path={write_config(config.model.path, models)}"]
    varied = vary(config, [*path, *on.overrides])
    check_values(varied)
    model = _architecture(varied.model.model_dump_json())
    return varied, Plan(varied, model, ranks=on.ranks, device=on.device, memory=on.memory)


@cache
def _architecture(settings: str) -> Architecture:
    """Made once for all recipes of a model."""
    return architecture(ModelSettings.model_validate_json(settings))


@pytest.mark.parametrize("name", sorted(SIZES))
def test_the_table_s_models_have_their_published_number_of_parameters(name: str, models: Path) -> None:
    assert architecture(ModelSettings(path=str(write_config(name, models)))).parameters == SIZES[name][-1]


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_fits_the_hardware_that_its_header_names(name: str, models: Path) -> None:
    named = hardware(name)
    assert named, f"{name}.yaml has no line such as '# Hardware: 8 × 80 GiB GPU'"
    for on in named:
        _, found = planned(name, (), models, on)
        assert found.fits(on.memory), (on, found.refusal, found.peak)


@pytest.mark.parametrize("name", [name for name in shipped() if hardware(name)[0].device == "gpu"])
def test_a_recipe_for_gpus_fits_with_vllm_too(name: str, models: Path) -> None:
    on = hardware(name)[0]._replace(overrides=("sampler.name=vllm",))
    _, found = planned(name, (), models, on)
    assert found.fits(on.memory), (on, found.refusal, found.peak)


# --- Qwen3-8B with LoRA on one card

LORA = ("model.new=null", "warm_start.steps=0", "model.lora={}", "model.path=Qwen/Qwen3-8B")
LONG = ("rollout.limits.max_context_tokens=8192", "rollout.limits.max_output_tokens=1024")
CARD = Hardware(1, "gpu", 80 * GIB, ())


def test_adapters_of_qwen3_8b_by_hand(models: Path) -> None:
    """16·36·(q 8192 + k 5120 + v 5120 + o 8192 + 3·(4096 + 12288)) adapters beside 8,190,735,360 frozen weights.

    In bfloat16: base and adapters of 2 bytes; masters, two moments and summed gradients of the adapters of 4 each, and
    fresh ones of 2.
    """
    _, found = planned("gsm8k", LORA, models, CARD)
    adapters = 16 * 36 * (8192 + 5120 + 5120 + 8192 + 3 * 16384)
    assert (found.trainable, found.weights) == (adapters, 8_190_735_360 + adapters)
    held = found.phases["learning"]
    assert held["weights"] == 2 * (8_190_735_360 + adapters)
    assert held["fp32 masters"] == 4 * adapters
    assert held["gradients"] == (4 + 2) * adapters
    assert held["Adam's moments"] == 8 * adapters


@pytest.mark.parametrize("more", [(), ("sampler.name=vllm", "model.dtype=float32"), ("model.lora=null",)])
def test_a_fitting_setting_for_qwen3_8b_is_found_as_overrides(more: tuple[str, ...], models: Path) -> None:
    config, found = planned("gsm8k", (*LORA, *LONG, *more), models, CARD)
    assert not found.fits(CARD.memory)
    change = remedy(found, CARD.memory)
    assert change is not None
    overrides, after = change
    assert (after.ranks, after.bytes <= CARD.memory) == (1, True)
    again = vary(config, lines(overrides))  # as a person pastes them behind the command
    check_values(again)
    assert Plan(again, found.model, ranks=1, device="gpu", memory=CARD.memory).phases == after.phases


def test_qwen3_8b_with_lora_and_vllm_fits_one_card_with_defaults(models: Path) -> None:
    on = CARD._replace(overrides=("sampler.name=vllm",))
    _, found = planned("gsm8k", (*LORA, *LONG), models, on)
    assert found.fits(CARD.memory)
