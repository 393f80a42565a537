"""Real families at a tiny size: mixtures of experts with adapters, and models without sdpa."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import trained_weights
from peft.tuners.lora import LoraLayer
from tiny import rows, tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from two_ranks import OPTIMISER, loss, micro_batches

from condensegrpo.algorithms.segments import reply_row
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.engine import close_deepspeed, open_deepspeed, optimizer_step
from condensegrpo.learner.logprobs import TrainedLogprobs
from condensegrpo.learner.lora import add_adapters
from condensegrpo.learner.lora_targets import check_targets
from condensegrpo.learner.model_folder import attention_of, in_main_memory, load_policy, write_policy
from condensegrpo.learner.settings import ALL_LINEAR, LoraSettings
from condensegrpo.learner.vision_tower import freeze_tower
from condensegrpo.learner.weights import gathered_weights

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LAYERS = ["full_attention", "sliding_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": TEXT | ROUTED | {"num_experts": 4},
    "mixtral": TEXT | {"num_local_experts": 4},
    "glm4_moe": TEXT | ROUTED | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "gpt_oss": TEXT
    | {"num_local_experts": 4, "layer_types": LAYERS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "mamba": {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "mamba2": TEXT | {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1},
}


def model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
    return made.eval()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_adapters_of_all_linear_layers_leave_fused_experts_alone_and_take_gradients(family: str) -> None:
    names = dict(model(family).named_parameters()).keys()
    policy = add_adapters(model(family), LoraSettings(targets=ALL_LINEAR, rank=2), base="base", seed=0)
    adapted = [part for part in policy.modules() if isinstance(part, LoraLayer)]
    assert len(adapted) == 2 * 4  # layers; query, key, value and output
    assert all(isinstance(part.get_base_layer(), nn.Linear) for part in adapted)
    base = {name.replace(".base_layer", "") for name, _ in policy.named_parameters() if "lora_" not in name}
    assert base == names
    policy(input_ids=torch.arange(8)[None], use_cache=False).logits.square().sum().backward()
    moved = [name for name, tensor in trained_weights(policy).items() if tensor.grad is not None and tensor.grad.any()]
    assert len(moved) == 2 * 4  # B; A moves once B is not 0


def test_a_mixture_of_experts_trains_its_adapters_and_is_given_out_under_its_own_names() -> None:
    policy = add_adapters(model("qwen3_moe"), LoraSettings(targets=ALL_LINEAR, rank=2), base="base", seed=0)
    learner = open_deepspeed(policy, zero_stage=0, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    optimizer_step(learner, micro_batches(rows(4), 2), loss)
    found = {name: tensor.clone() for name, tensor in gathered_weights(learner)}
    close_deepspeed(learner)
    base = dict(model("qwen3_moe").named_parameters())
    assert found.keys() == base.keys()
    changed = {name.rpartition(".")[0].rpartition(".")[2] for name in base if not torch.equal(found[name], base[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("targets", [ALL_LINEAR, LoraSettings().targets])
def test_layers_that_peft_takes_for_fused_experts_are_refused_with_targets_that_work(targets: Any) -> None:
    working = ("q_proj", "k_proj", "v_proj", "o_proj")
    with pytest.raises(ConfigError, match=rf"Set model\.lora\.targets=\[{', '.join(working)}\]"):
        check_targets(model("glm4_moe"), targets)
    policy = add_adapters(model("glm4_moe"), LoraSettings(targets=working, rank=2), base="base", seed=0)
    assert sum(isinstance(part, LoraLayer) for part in policy.modules()) == 2 * 4


@pytest.mark.parametrize("family", ["gpt_oss", "mamba", "mamba2"])
def test_a_model_without_sdpa_is_loaded_with_attention_auto_and_keeps_rows_apart(family: str, tmp_path: Path) -> None:
    model(family).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), dtype="float32")
    module = TrainedLogprobs(policy)
    module.check()
    assert not module.computes_trees
    uneven = [reply_row((1,), (2,) * length, weight=1.0) for length in (30, 2, 2, 2, 2, 2)]
    batches = module.pack(uneven, max_tokens=40)
    assert [tuple(module.place(batch).token_ids.shape) for batch in batches] == [(1, 31), (5, 3)]
    with pytest.raises(ConfigError, match=r"found sdpa, and \w+ has no such attention\. Set model\.attention=auto"):
        attention_of(policy.config, "sdpa")


def test_qwen3_5_as_published_keeps_its_tower_and_gives_its_weights_under_the_names_of_its_class(
    tmp_path: Path,
) -> None:
    """vLLM's class maps model.language_model., model.visual. and lm_head., not the names of the text model alone."""
    heads = {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    tower = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "patch_size": 4,
    }
    config = AutoConfig.for_model(
        "qwen3_5",
        text_config=TEXT | heads | {"layer_types": ["linear_attention", "full_attention"]},
        vision_config=tower | {"num_position_embeddings": 16},
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "published")
    policy = load_policy(str(tmp_path / "published"), dtype="float32")
    base = {name: tensor.clone() for name, tensor in policy.named_parameters()}
    assert {name.partition("layers")[0].partition("blocks")[0] for name in base} >= {
        "model.language_model.",
        "model.visual.",
        "lm_head.weight",
    }
    freeze_tower(policy)
    learner = open_deepspeed(policy, zero_stage=0, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    learner.module.check()
    optimizer_step(learner, micro_batches(rows(4), 2), loss)
    found = in_main_memory(gathered_weights(learner))
    close_deepspeed(learner)
    write_policy(tmp_path / "exported", policy.config, found, tokenizer=tokenizer())
    exported = dict(load_policy(str(tmp_path / "exported"), dtype="float32").named_parameters())
    assert exported.keys() == base.keys()
    kept = {name for name, tensor in base.items() if torch.equal(exported[name], tensor)}
    assert kept == {name for name in base if name.startswith("model.visual.")}
