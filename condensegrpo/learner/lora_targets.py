"""Which layers adapters can stand beside. Without PEFT and DeepSpeed: it is checked before anything is loaded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.model_folder import auto_class, composite
from condensegrpo.learner.settings import ALL_LINEAR, Targets, Vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")  # PEFT takes these names for fused experts


def check_targets(policy: "PreTrainedModel", targets: Targets, vision: Vision = "frozen") -> None:
    """Check that every target names linear layers of the policy, and none its LM head, or those of a frozen tower.

    The head is computed on trained positions only, from its plain weight; often it is tied to the embeddings as well.
    """
    layers = _linear_layers(policy, vision)
    known = ", ".join(leaves(layers)) or "none"
    if not layers or not targets:
        raise ConfigError(
            f"placing LoRA adapters: {type(policy).__name__} has {len(layers)} linear layers ({known}), and "
            f"model.lora.targets names {len(targets)}. Name some, or set model.lora=null to train all weights."
        )
    for target in () if targets == ALL_LINEAR else targets:
        if not any(_matches_any(name, (target,)) for name in layers):
            raise ConfigError(
                f"placing LoRA adapters: model.lora.targets names {target!r}, which is no linear layer of "
                f"{type(policy).__name__} that can be adapted. Its linear layers, the LM head left out: {known}. "
                f"Choose among those, or set model.lora.targets={ALL_LINEAR} for all of them."
            )

    if has_fused_experts(policy):
        matched = layers if targets == ALL_LINEAR else [name for name in layers if _matches_any(name, targets)]
        if taken := [leaf for leaf in leaves(matched) if leaf in EXPERTS]:
            others = ", ".join(leaf for leaf in leaves(layers) if leaf not in EXPERTS)
            raise ConfigError(
                f"placing LoRA adapters: {type(policy).__name__} keeps the weights of its experts in one tensor, which "
                f"PEFT adapts in place of the layers {', '.join(taken)}, and such adapters cannot be merged. Set "
                f"model.lora.targets=[{others}]."
            )


def check_targets_of(source: str, targets: Targets, vision: Vision = "frozen") -> None:
    """``check_targets`` for the model of a local folder or Hub id, from its configuration: no weights are loaded."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        policy = auto_class(config).from_config(config)
    check_targets(policy, targets, vision)


def adapted_layers(policy: "PreTrainedModel", targets: Targets, vision: Vision = "frozen") -> list[nn.Linear]:
    """The linear layers that adapters will stand beside."""
    check_targets(policy, targets, vision)
    names = _linear_layers(policy, vision)
    if targets != ALL_LINEAR:
        names = [name for name in names if _matches_any(name, targets)]
    return [cast(nn.Linear, policy.get_submodule(name)) for name in names]


def peft_targets(policy: "PreTrainedModel", targets: Targets, vision: Vision) -> str | list[str]:
    """The targets as PEFT takes them: beside fused experts its ``all-linear`` would adapt those too."""
    if targets == ALL_LINEAR:
        return leaves(_linear_layers(policy, vision)) if has_fused_experts(policy) else ALL_LINEAR
    return list(targets)


def has_fused_experts(policy: "PreTrainedModel") -> bool:
    """Whether a layer keeps the weights of its experts in one tensor (experts, out, in)."""
    return any(name.endswith("_proj") and tensor.ndim == 3 for name, tensor in policy.named_parameters())


def leaves(names: Sequence[str]) -> list[str]:
    """The last parts of some names, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def decoder_name(policy: "PreTrainedModel") -> str:
    """The name of a policy's decoder among its modules; "" where it is the policy itself."""
    decoder: nn.Module = policy.get_decoder()
    parts: dict[str, nn.Module] = dict(policy.named_modules())
    return next(name for name, part in parts.items() if part is decoder)


def _linear_layers(policy: "PreTrainedModel", vision: Vision) -> list[str]:
    head = policy.get_output_embeddings()
    names = [name for name, part in policy.named_modules() if isinstance(part, nn.Linear) and part is not head]
    if vision == "train" or not composite(policy.config):
        return names
    return [name for name in names if name.startswith(f"{decoder_name(policy)}.")]


def _matches_any(name: str, targets: Sequence[str]) -> bool:
    """As PEFT matches: the whole name or its last parts."""
    return any(name == target or name.endswith(f".{target}") for target in targets)
