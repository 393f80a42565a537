"""The accelerator: device and stream of a thread, uploads without a wait, and the data types of weights."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from condensegrpo.learner.settings import Dtype

ALIGNMENT = 16  # bytes: a part of a buffer begins where any type may
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
gpu: Any = torch.cuda  # tests replace it
set_allocator: Any = getattr(  # likewise; torch 2.9 has the second one
    torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings
)


def on_this_device() -> Callable[[], None]:
    """A function for the start of another thread: it makes the current device of this thread that thread's device."""
    if not gpu.is_available():
        return lambda: None
    return partial(gpu.set_device, gpu.current_device())


def expand_segments(environment: Mapping[str, str]) -> None:
    """Let torch's allocator extend its segments: micro-batches of other lengths then leave fewer gaps between tensors.

    Settings in the environment take precedence. vLLM's allocator, which can sleep, must not be in this process: torch's
    pools for it cannot have such segments (https://github.com/pytorch/pytorch/issues/147851).
    """
    if gpu.is_available() and not any(name in environment for name in ALLOCATOR_SETTINGS):
        set_allocator("expandable_segments:True")


def device_memory() -> int | None:
    """Bytes of this thread's device, in use or not; None: there is no GPU."""
    return int(gpu.get_device_properties(gpu.current_device()).total_memory) if gpu.is_available() else None


def use_new_stream() -> None:
    """Give this thread a stream, on which its work does not wait for that of other threads."""
    if gpu.is_available():
        gpu.set_stream(gpu.Stream())


def synchronize() -> None:
    """Wait until the device has done the work of all streams: then any thread can use the results."""
    if gpu.is_available():
        gpu.synchronize()


def empty_cache() -> None:
    """Give back what torch's allocator keeps for streams that have no use for it: other streams cannot take it."""
    if gpu.is_available():
        gpu.empty_cache()


def copy_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of main memory on a device, by one copy that the host does not wait for; on a CPU they themselves.

    A copy of each would wait until the device has done all work before it. The pinned buffer is torch's to free: its
    allocator keeps it until the copy is done.
    """
    if device.type == "cpu":
        return list(tensors)
    distinct = {id(tensor): tensor for tensor in tensors}
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in distinct.values()]
    parts = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=torch.accelerator.is_available())
    for part, tensor in zip(parts, distinct.values(), strict=True):
        _part(buffer[part], tensor).copy_(tensor)
    uploaded = buffer.to(device, non_blocking=True)
    placed = {key: _part(uploaded[part], distinct[key]) for key, part in zip(distinct, parts, strict=True)}
    return [placed[id(tensor)] for tensor in tensors]


def _part(memory: Tensor, like: Tensor) -> Tensor:
    """The first bytes of some memory as a tensor of the type and shape of another."""
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def gpu_bfloat16() -> bool | None:
    """Whether this machine's GPU computes in bfloat16 (NVIDIA: compute capability 8.0 or later); None without a GPU."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else None


def default_dtype(bfloat16: bool | None) -> Dtype:
    """The ``model.dtype`` that is not set, by ``gpu_bfloat16``."""
    return "bfloat16" if bfloat16 else "float32"


def precision_warning(dtype: Dtype, bfloat16: bool | None) -> str | None:
    """The warning of a run on a GPU (``gpu_bfloat16``) that does not train in bfloat16; None: no warning."""
    if dtype == "bfloat16" or bfloat16 is None:
        return None
    return f"WARNING: training in {dtype} on a GPU, with twice the memory of bfloat16 and a fraction of its speed: " + (
        f"model.dtype={dtype} is set. Leave it out, or set model.dtype=bfloat16"
        if bfloat16
        else "this GPU does not compute in bfloat16, which NVIDIA's do from compute capability 8.0 on"
    )
