"""Weights of a model by name and shape, checked before vLLM loads them, and copies that vLLM does not update."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from condensegrpo.core.errors import SamplerError


class ExpectedWeights:
    """Names and shapes of a model folder's weights, from its configuration: no weight is loaded.

    vLLM renames and fuses weights (q, k and v are one tensor) and only logs a missing name. So names and shapes are
    compared with those of the model in transformers, which is the learner's.
    """

    def __init__(self, model_path: str) -> None:
        """Read ``config.json``.

        Raises:
            SamplerError: the model cannot be read.
        """
        try:
            config = AutoConfig.from_pretrained(model_path)
            with torch.device("meta"):
                model: nn.Module = AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError) as error:
            raise SamplerError(
                f"loading the sampler's model from {model_path!r}: {error} Wanted a Hugging Face folder or Hub id of "
                f"a causal language model."
            ) from error
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._groups = _tied(model)
        self.head_size = _head_size(config)

    def check(self) -> "UpdateCheck":
        """A new check of one update."""
        return UpdateCheck(shapes=self._shapes, groups=self._groups)


@dataclass(slots=True, kw_only=True)
class UpdateCheck:
    """Checks the tensors of an update one by one and raises after the last: a reload must not stop halfway."""

    shapes: Mapping[str, tuple[int, ...]]
    groups: tuple[frozenset[str], ...]  # names of the same weight
    taken: set[str] = field(default_factory=set)
    fault: str = ""  # the first

    def takes(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor can be loaded."""
        if name not in self.shapes:
            self.fault = self.fault or (
                f"{name!r} is no weight of its model, which has {len(self.shapes)} from {min(self.shapes)!r} to "
                f"{max(self.shapes)!r}. Learner and sampler must load the same architecture."
            )
            return False
        if tuple(tensor.shape) != self.shapes[name]:
            self.fault = self.fault or (
                f"{name!r} has the shape {tuple(tensor.shape)}, the sampler's model wants {self.shapes[name]}. Gather "
                f"sharded weights before handing them over."
            )
            return False
        self.taken.add(name)
        return True

    def complete(self) -> None:
        """Check that every weight was given, under one of its names.

        Raises:
            SamplerError: a weight is missing or was refused. The sampler now holds old and new weights.
        """
        missing = [min(group) for group in self.groups if not group & self.taken]
        if not self.fault and missing:
            self.fault = (
                f"{len(missing)} of {len(self.groups)} were not given, the first is {min(missing)!r}. The sampler now "
                f"holds old and new weights: hand over all of them."
            )
        if self.fault:
            raise SamplerError(f"updating the sampler's weights: {self.fault}")


def repack_heads(model: nn.Module) -> None:
    """Repack a tied LM head from the embedding that it is tied to.

    On a CPU vLLM multiplies by packed copies of its weights. Loading new weights repacks them layer by layer but skips
    a head without its own weight, which would keep the old ones: its logits would be those of two policies.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for part in model.modules():
        if isinstance(part, ParallelLMHead):
            part.quant_method.process_weights_after_loading(part)  # does nothing on a GPU


def _tied(model: nn.Module) -> tuple[frozenset[str], ...]:
    """The names of every parameter: several where it is tied."""
    names: dict[int, set[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), set()).add(name)
    return tuple(frozenset(group) for group in names.values())


def _head_size(config: Any) -> int | None:  # noqa: ANN401  transformers' classes are untyped
    text = config.get_text_config().to_dict()
    given, width, heads = (text.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if given is not None:
        return int(given)
    return int(width) // int(heads) if width and heads else None
