"""Adapters on the models of ``tiny``, with weights that say something, for the learner's tests."""

import torch
from tiny import qwen3
from torch import Tensor
from transformers import PreTrainedModel

from condensegrpo.learner.lora import adapted, add_adapters
from condensegrpo.learner.settings import ALL_LINEAR, LoraSettings

LORA = LoraSettings(rank=4, alpha=8.0, dropout=0.0, targets=("q_proj", "v_proj", "down_proj"))
EVERYWHERE = LoraSettings(rank=2, alpha=4.0, dropout=0.5, targets=ALL_LINEAR)


def adapted_qwen3(lora: LoraSettings = LORA, *, seed: int = 3) -> PreTrainedModel:
    """As training begins: B is 0."""
    return add_adapters(qwen3(), lora, base="base", seed=seed)


def moved_qwen3(lora: LoraSettings = LORA) -> PreTrainedModel:
    """As it may be after some steps: B is anything."""
    policy = adapted_qwen3(lora)
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for part in policy.modules():
            layer = adapted(part)
            if layer is not None:
                layer.b.copy_(torch.randn(layer.b.shape, generator=draw) * 0.1)
    return policy


def trained_weights(policy: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in policy.named_parameters() if tensor.requires_grad}
