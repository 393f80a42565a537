"""Activation checkpointing: decoder layers keep only their input for backward, which computes the rest again.

The plan of a run (``planning/plan.py``) says how many layers must do so on a GPU; the others save their second pass.

What a device keeps of the layers until backward, for S tokens (with sequence parallelism: those of this rank):

    off   in every layer what autograd saves there (``planning/formulas.py``, ``layer_bytes``)
    on    in every layer its input, S·H numbers in the precision of the weights; and during backward what autograd saves
          in one layer, since layers are computed again one after another

The embedding, the last norm and the LM head (``head.py``) are outside and keep what they did. Backward then contains
another forward pass, about a third more computation. Gradients are equal to the bit: what is random in a layer, such as
the dropout of adapters, is drawn from the same state again. Under ZeRO 3 DeepSpeed gathers the weights of a layer once
more for its second pass.

Legend: S tokens, H hidden size.
"""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.policy import sees
from condensegrpo.learner.settings import Checkpointing


def checkpointed_layers(setting: Checkpointing, layers: int, *, gpu: bool) -> int:
    """How many of the layers are checkpointed; ``auto``: all on a GPU, unless a plan knows its memory."""
    if setting == "auto" or isinstance(setting, bool):
        return layers if setting is True or (gpu and setting == "auto") else 0
    return min(setting, layers)


def checkpoint_layers(policy: PreTrainedModel, count: int | None = None) -> None:
    """Let decoder layers of the policy keep only their input for backward: the first ``count``; None: all.

    A vision tower that trains does so in all of its layers.

    The last ones keep all: backward frees them before it computes a layer again.

    transformers' own switch does nothing in evaluation mode, in which the policy stays (without dropout it agrees with
    the sampler), and training mode would switch on the dropout that some models apply in the layer itself. Hence the
    layer's forward is wrapped here. Without gradients, as in measuring log-probabilities, nothing changes.

    Raises:
        ConfigError: the model has no layers that transformers would checkpoint.
    """
    decoder: nn.Module = policy.get_decoder()
    layers = _layers(decoder)
    if not layers:
        raise ConfigError(
            f"checkpointing the activations of {type(policy).__name__}: it has no layer that transformers supports "
            f"this for. Set learner.checkpoint_activations=off, or use a model such as Qwen3 or Llama."
        )
    of_tower = [layer for layer in _layers(policy) if layer not in set(layers)] if sees(policy.config) else []
    trained = [layer for layer in of_tower if any(tensor.requires_grad for tensor in layer.parameters())]
    for layer in (*layers[:count], *trained):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _layers(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
