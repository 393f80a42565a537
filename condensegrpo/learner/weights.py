"""The learner's weights under their Hugging Face names, for samplers and export, and a hash that identifies them."""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from condensegrpo.learner.deepspeed_import import DeepSpeedEngine, deepspeed, without_deprecations
from condensegrpo.learner.lora import ADAPTER, adapted, base_name, merged_weight
from condensegrpo.learner.ranks import rank

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers as wide as a number, in bytes


def gathered_weights(engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
    """The policy's weights, (name in its ``state_dict``, tensor), one module at a time; every rank must exhaust it.

    Under ZeRO 3 a module's weights are gathered from all ranks for as long as they are given out and no longer: the
    whole model never lies in one place. A tensor is the learner's own and not a copy: copy it before taking the next.
    A weight with two names (tied embeddings) comes once, under the first, which is the name that vLLM and
    transformers load.

    An adapted layer comes as its one weight, base and adapter together, merged and named as in a model without
    adapters; the base keeps its bytes.
    """
    policy: PreTrainedModel = engine.module.policy
    names = {id(tensor): base_name(name) for name, tensor in policy.named_parameters()}
    for part in policy.modules():
        layer = adapted(part)
        if layer is not None:
            weight, *_ = (names.pop(id(tensor)) for tensor in layer)
            with gathered(engine, layer):
                yield weight, merged_weight(part)
            continue
        tensors = [tensor for tensor in part.parameters(recurse=False) if id(tensor) in names]
        with gathered(engine, tensors):
            for tensor in tensors:
                yield names.pop(id(tensor)), tensor.detach()
    kept = policy.state_dict().keys()
    yield from ((name, buffer) for name, buffer in policy.named_buffers() if name in kept)


@contextmanager
def gathered(engine: DeepSpeedEngine, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gather parameters on every rank, which only ZeRO 3 needs; every rank must enter the block."""
    with ExitStack() as stack:
        if parameters and engine.zero_optimization_stage() == 3:
            with without_deprecations():
                stack.enter_context(deepspeed.zero.GatheredParameters(list(parameters)))
        yield


def adapters(engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
    """The adapters alone under PEFT's names, one layer at a time; otherwise as ``gathered_weights``."""
    for name, part in engine.module.policy.named_modules():
        layer = adapted(part)
        if layer is not None:
            with gathered(engine, [layer.a, layer.b]):
                yield f"base_model.model.{name}.lora_A.weight", layer.a.detach()
                yield f"base_model.model.{name}.lora_B.weight", layer.b.detach()


def write_adapter(folder: Path, policy: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Write adapters as a PEFT folder, which ``PeftModel.from_pretrained(base, folder)`` loads; on one rank."""
    config = copy(policy.peft_config[ADAPTER])
    config.inference_mode = True
    folder.mkdir()
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


@torch.no_grad()
def fingerprint(engine: DeepSpeedEngine) -> str:
    """A hash of the names and shapes of all weights, and of the values of those that are frozen.

    Every rank must call it, and the first one's is the answer: under ZeRO 3 weights are gathered, a module at a time.
    Without frozen weights nothing is gathered or read.
    """
    digest = hashlib.sha256()
    policy = engine.module.policy
    for name, part in policy.named_modules():
        parameters = dict(part.named_parameters(recurse=False))
        frozen = [tensor for tensor in parameters.values() if not tensor.requires_grad]
        with gathered(engine, frozen):
            for label, tensor in parameters.items():
                shape = tuple(tensor.ds_shape) if engine.zero_optimization_stage() == 3 else tuple(tensor.shape)
                digest.update(f"{name}.{label} {shape}\n".encode())
                if not tensor.requires_grad and rank() == 0:
                    # the sum of its bits, read as whole numbers: exact, and the same on any device and in any order
                    checksum = int(tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64))
                    digest.update(str(checksum).encode())
    return digest.hexdigest()


@contextmanager
def all_gathered(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """A block that may read weights, or some of them; what it leaves is gathered at its end, which takes every rank."""
    tensors = iter(named_tensors)
    try:
        yield tensors
    except BaseException:
        with suppress(Exception):  # the first error is the cause
            deque(tensors, maxlen=0)
        raise
    deque(tensors, maxlen=0)
