"""The learner's state, moved to main memory while the sampler needs the GPU: moments, fp32 weights, gradients.

The weights that the model computes with stay where they are: the sampler gets them while the state is away. An
optimiser step needs the state; measuring, sending weights and saving a checkpoint do not. Not in bfloat16 below ZeRO 2,
whose optimiser in DeepSpeed cannot move (``config/checks.py`` refuses it).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from condensegrpo.learner.deepspeed_import import DeepSpeedEngine, deepspeed, get_accelerator

_states = deepspeed.runtime.zero.offload_states
_Kind = deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum


def to_main_memory(engine: DeepSpeedEngine) -> None:
    """Move the state out of the GPU. It may be there already."""
    pinned, stage = torch.accelerator.is_available(), engine.zero_optimization_stage()
    if stage in (1, 2):
        engine.offload_states(include=[_Kind.optim_states, _Kind.hp_params, _Kind.lp_grads], pin_memory=pinned)
        return
    _states.offload_optimizer_states(_adamw(engine), "cpu", pin_memory=pinned)
    if stage == 3:  # DeepSpeed does the rest for its own Adam only
        for tensor in engine.optimizer.fp32_partitioned_groups_flat:
            tensor.data = _on_cpu(tensor.data, pinned=pinned)
        engine.offload_states(include=[_Kind.lp_grads, _Kind.contiguous_grad_buffer], pin_memory=pinned)
    get_accelerator().empty_cache()


def to_device(engine: DeepSpeedEngine) -> None:
    """Move the state back to the GPU."""
    stage, device = engine.zero_optimization_stage(), get_accelerator().current_device_name()
    if stage in (1, 2):
        engine.reload_states()
        return
    _states.reload_optimizer_states(_adamw(engine), device)
    if stage == 3:
        for tensor in engine.optimizer.fp32_partitioned_groups_flat:
            tensor.data = tensor.data.to(device)
        engine.reload_states()


@contextmanager
def on_device(engine: DeepSpeedEngine) -> Iterator[None]:
    """The state is on the GPU, and in main memory before and after."""
    to_device(engine)
    yield
    to_main_memory(engine)


def _adamw(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """The optimiser of torch: ZeRO wraps it."""
    optimizer: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return optimizer


def _on_cpu(tensor: Tensor, *, pinned: bool) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor) if pinned else tensor.cpu()
