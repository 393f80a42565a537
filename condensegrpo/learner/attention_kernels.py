"""Which kernel computes the learner's attention: by device, model, installed packages, and how much is shared.

    name     where            computes trees as                        memory beside q, k, v and the output
    sdpa     anywhere         pieces of branches (tree_attention.py)   padded pieces and, for each pair of them, a mask
    flex     a GPU            intervals (tree_kernels.py)              16 bytes a block of 128 × 128 pairs, once
    flash    a GPU, bfloat16  branches (tree_kernels.py)               gathered keys and values of each branch's path

``auto`` takes sdpa on a CPU. On a GPU it takes flash for micro-batches that share little, if it is installed, and flex
for the others. Both are first compared with sdpa on that GPU, with the model's heads and type; one that fails or
differs is not used, and the log says so. Any other name is an attention of transformers, which computes plain rows.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from transformers import AttentionInterface, utils

from condensegrpo.core.errors import ConfigError, LearnerError
from condensegrpo.learner.ranks import gather
from condensegrpo.learner.settings import TREE_KERNELS
from condensegrpo.learner.tree_attention import AttentionPattern, HostPattern, paths
from condensegrpo.learner.tree_kernels import (
    Flex,
    Varlen,
    branch_pattern,
    compiled_flex,
    flash_varlen,
    gathered_keys,
    intervals,
)

CPU_KERNELS = ("auto", "sdpa", "eager")
LISTED = (*TREE_KERNELS, "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4")
# Most keys that flash gathers a token. It computes the same pairs as flex, and faster; what it costs is the memory of
# the keys. Twice as many are 3 % more of what a layer of Qwen3-8B keeps of a token, 10 % where every head has its own.
MAX_KEYS = 2.0
INSTALL = "pip install -e '.[kernels]'"
SMALLEST_HEAD = 16  # channels, of Triton's matrix products
# Two trees of 392 tokens and 64, and 56 trees of one. The first has branches at depths 150 and 37.
PROBE_DEPTHS = (*range(200), *range(150, 230), *range(37, 149), *range(64), *[0] * 56)


class Heads(NamedTuple):
    """The attention heads of a model."""

    queries: int  # heads
    keys: int  # heads
    size: int  # channels of each


class Kernels(NamedTuple):
    """The kernels that compute the attention of micro-batches; without ``flex`` and ``varlen`` it is sdpa."""

    description: str  # for the log
    flex: Flex | None = None
    varlen: Varlen | None = None
    max_keys: float = MAX_KEYS  # gathered a token, up to which it is ``varlen``

    def pattern(self, depths: Sequence[int]) -> HostPattern:
        """The attention pattern of a micro-batch, of which ``depths`` are those of the tokens in their rows."""
        if self.varlen is not None and gathered_keys(depths) <= self.max_keys * len(depths):
            return branch_pattern(depths, self.varlen)
        return paths(depths) if self.flex is None else intervals(depths, self.flex)


def check_attention(attention: str, dtype: str) -> None:
    """Check that ``model.attention`` names a kernel that can run here."""
    fault = why_not(attention, dtype)
    if fault is not None:
        able = [name for name in LISTED if why_not(name, dtype) is None]
        raise ConfigError(f"checking model.attention: found {attention}; {fault}. Set one of {', '.join(able)}.")


def why_not(attention: str, dtype: str) -> str | None:
    """Why a kernel cannot run here with weights of this type, as far as that is known before; None: it may."""
    if attention in CPU_KERNELS:
        return None
    if attention not in TREE_KERNELS and "/" not in attention and attention not in AttentionInterface().valid_keys():
        return "there is no such kernel"
    if not torch.cuda.is_available():
        return "it runs on a GPU, and torch finds none"
    if attention in ("flex", "flex_attention"):
        if dynamo_config.disable:
            return (
                "torch.compile is switched off (TORCH_COMPILE_DISABLE), and uncompiled it computes all pairs of tokens"
            )
        return None if find_spec("triton") else "it is compiled by triton, which is not installed"
    if dtype != "bfloat16":
        return f"it computes bfloat16, and model.dtype is {dtype}"
    version = attention.removeprefix("flash_attention_") if attention.startswith("flash_attention_") else "2"
    # transformers 5.0 does not know flash-attention 4
    installed = getattr(utils, f"is_flash_attn_{version}_available", utils.is_kernels_available)
    if not (installed() or utils.is_kernels_available()):
        return f"neither flash-attn nor kernels is installed ({INSTALL})"
    return None


def planned_kernel(attention: str, *, gpu: bool) -> str:
    """The kernel to count memory for before the device is there; ``auto`` on a GPU: that of rows that share much."""
    if attention == "auto":
        return "flex" if gpu else "sdpa"
    return attention


@cache
def kernels_on(attention: str, heads: Heads, dtype: torch.dtype, device: torch.device) -> Kernels:
    """The kernels that compute trees with ``model.attention`` on a device, the same on every rank.

    The first call on a GPU compiles and compares kernels; every rank must make it.
    """
    if attention == "sdpa" or device.type == "cpu":
        return Kernels("attention kernel: sdpa")
    candidates = [name for name in ("flash", "flex") if attention in (name, "auto")]
    faults = agreed(gather({name: kernel_fault(name, heads, dtype, device) for name in candidates}))
    if faults.get(attention) is not None:
        raise LearnerError(
            f"computing attention with {attention} on {device}: {faults[attention]}. Set model.attention=auto, which "
            f"takes a kernel that can be used."
        )
    usable = [name for name, fault in faults.items() if fault is None]
    return Kernels(
        describe_choice(attention, faults),
        flex=compiled_flex() if "flex" in usable else None,
        varlen=flash_varlen() if "flash" in usable else None,
        max_keys=inf if attention == "flash" else MAX_KEYS,
    )


def agreed(faults: Sequence[Mapping[str, str | None]]) -> dict[str, str | None]:
    """The faults of kernels from those on each rank: one that fails anywhere is used nowhere.

    Ranks that share a row pad it alike only with the same kernel.
    """
    return {
        name: next((f"{each[name]} (rank {rank})" for rank, each in enumerate(faults) if each[name] is not None), None)
        for name in faults[0]
    }


def describe_choice(attention: str, faults: Mapping[str, str | None]) -> str:
    """The choice on a GPU, for the log, by the faults of the kernels that were checked (None: it can be used).

    Example: attention kernel: flash up to 2 gathered keys a token, flex beyond
    """
    usable = [name for name, fault in faults.items() if fault is None]
    if attention != "auto":
        return f"attention kernel: {attention}"
    others = "flex" if "flex" in usable else "sdpa"
    used = f"flash up to {MAX_KEYS:g} gathered keys a token, {others} beyond" if "flash" in usable else others
    unused = [f"{name} is not used: {fault}" for name, fault in faults.items() if fault is not None]
    return "; ".join([f"attention kernel: {used}", *unused])


def kernel_fault(kernel: str, heads: Heads, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why flex or flash cannot be used with a model's heads on the device that will train; None: it can.

    It is compared with sdpa in float32 on trees of 512 tokens.
    """
    fault = why_not(kernel, str(dtype).removeprefix("torch."))
    if fault is None and kernel == "flex" and heads.size < SMALLEST_HEAD:
        fault = f"it takes heads of at least {SMALLEST_HEAD} channels, and the model's have {heads.size}"
    if fault is not None:
        return fault
    try:
        of_flex = kernel == "flex"
        make = partial(intervals, flex=compiled_flex()) if of_flex else partial(branch_pattern, varlen=flash_varlen())
        measured = kernel_error(make, heads, dtype, device)
    except Exception as error:  # the boundary to compilers and packages, which have exceptions of all kinds
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    most = max(1e-3, 4 * torch.finfo(dtype).eps)  # 3 % in bfloat16; a pair too many or too few moves some by far more
    return None if measured <= most else f"it differs from sdpa by {measured:.2g} of the norm"


def kernel_error(
    make: Callable[[Sequence[int]], HostPattern], heads: Heads, dtype: torch.dtype, device: torch.device
) -> float:
    """The largest relative error ‖found − expected‖ / ‖expected‖ of a kernel's output and gradients.

    Expected is what sdpa computes in float32.

    Args:
        make: creates the kernel's attention pattern from depths (512,).
    """
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, count, len(PROBE_DEPTHS), heads.size) for count in (heads.queries, heads.keys, heads.keys)]
    weight, *inputs = [
        torch.randn(shape, generator=draw).to(device, dtype)
        for shape in ((1, len(PROBE_DEPTHS), heads.queries, heads.size), *shapes)
    ]
    computed, expected = (
        _output_and_gradients(pattern.on(device), weight.to(kind), [tensor.to(kind) for tensor in inputs])
        for pattern, kind in ((make(PROBE_DEPTHS), dtype), (paths(PROBE_DEPTHS), torch.float32))
    )
    pairs = zip(computed, expected, strict=True)
    return max(float((output.float() - exact).norm() / exact.norm()) for output, exact in pairs)


def _output_and_gradients(pattern: AttentionPattern, weight: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    with torch.enable_grad():
        query, key, value = (tensor.detach().requires_grad_() for tensor in inputs)
        output = pattern.attend(query, key, value, scaling=None)
        return [output.detach(), *torch.autograd.grad(output, (query, key, value), weight)]
