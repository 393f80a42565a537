"""LoRA through PEFT: adapters of low rank beside linear layers. They train; the base is frozen and never written to.

    y = W·x + s·B·A·dropout(x)        A (r, in), B (out, r), s = alpha/r; B = 0 at first, so that y = W·x

https://arxiv.org/abs/2106.09685, sec. 4.1. Adapters are injected: the policy stays the class that it was, and only the
adapted layers change: ``x.q_proj`` becomes ``x.q_proj.base_layer`` with ``x.q_proj.lora_A.default`` beside it.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from condensegrpo.learner.lora_targets import check_targets, decoder_name, peft_targets
from condensegrpo.learner.model_folder import composite
from condensegrpo.learner.settings import LoraSettings, Vision

ADAPTER = "default"  # PEFT's name of the only adapter
_BASE = ".base_layer"  # added by PEFT to the name of a layer that it adapts


def add_adapters(
    policy: PreTrainedModel, lora: LoraSettings, *, base: str, seed: int, vision: Vision = "frozen"
) -> PreTrainedModel:
    """The same policy, its weights frozen, with adapters beside the layers that ``lora.targets`` names.

    Targets name layers of a vision tower only if it is to ``train``.

    Args:
        policy: on the CPU; is changed.
        base: the folder or Hub id of its weights, which the adapter's folder names.
        seed: A is drawn from it, equally on every rank; torch's generator is left as it was.
    """
    check_targets(policy, lora.targets, vision)
    parts = vision == "frozen" and composite(policy.config)
    outside = rf"(?!{re.escape(decoder_name(policy))}\.).*" if parts else None
    config = LoraConfig(
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=peft_targets(policy, lora.targets, vision),
        exclude_modules=outside,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cast(PreTrainedModel, inject_adapter_in_model(config, policy, adapter_name=ADAPTER).eval())


def base_name(name: str) -> str:
    """The name that a weight has in the model without adapters.

    ``model.layers.0.mlp.up_proj.base_layer.weight`` → ``model.layers.0.mlp.up_proj.weight``
    """
    return name.replace(_BASE, "")


class Adapted(NamedTuple):
    """The weights of one adapted layer."""

    weight: nn.Parameter  # (out, in) W
    a: nn.Parameter  # (r, in)
    b: nn.Parameter  # (out, r)


def adapted(layer: nn.Module) -> Adapted | None:
    """The weights of a layer with an adapter; None for any other module."""
    if not isinstance(layer, LoraLayer):
        return None
    return Adapted(layer.get_base_layer().weight, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)


@torch.no_grad()
def merged_weight(layer: nn.Module) -> Tensor:
    """W + s·B·A of an adapted layer as a new tensor, added in fp32 and rounded once to the type of W.

    W itself is never written to: adding and subtracting in place would move it a little with every round.
    """
    weight, a, b = cast(Adapted, adapted(layer))
    scaling: float = cast(LoraLayer, layer).scaling[ADAPTER]
    return (weight.float() + b.float() @ a.float() * scaling).to(weight.dtype)


@contextmanager
def adapter_dropout(module: nn.Module) -> Iterator[None]:
    """Activate the adapters' dropout; everything else stays in evaluation mode. Without adapters it changes nothing.

    Masks are drawn from torch's generator of the device, whose state checkpoints hold.
    """
    dropouts = [layer.lora_dropout for layer in module.modules() if isinstance(layer, LoraLayer)]
    try:
        for dropout in dropouts:
            dropout.train()
        yield
    finally:
        for dropout in dropouts:
            dropout.eval()


@contextmanager
def adapters_disabled(module: nn.Module) -> Iterator[None]:
    """The module computes what its base alone would, exactly: s is 0.

    Unlike PEFT's ``disable_adapters`` the adapters run still, a few per cent of the pass: under ZeRO 3 the order of the
    layers that run is recorded, and which parameters take gradients is DeepSpeed's to know.
    """
    with rescale_adapter_scale(module, 0.0):
        yield
