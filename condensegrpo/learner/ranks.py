"""The process group of the ranks and what they exchange besides gradients.

All ranks must make the same calls; a single process may make them too.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but missing from torch's type stubs

from condensegrpo.learner.deepspeed_import import deepspeed, get_accelerator, without_deprecations

T = TypeVar("T")


def join() -> None:
    """Join the ranks' process group: the launcher's, or a group of one process. Gloo on a CPU, NCCL on GPUs.

    A group that already exists, such as one that a sampler created, is joined as it is.
    """
    if deepspeed.comm.is_initialized():
        return
    # Without this entry DeepSpeed compiles a shared-memory all-reduce with g++ and ninja, which only inference uses.
    deepspeed.ops.__compatible_ops__ = {}
    if "RANK" not in os.environ:
        os.environ.setdefault("LOCAL_RANK", "0")  # required by DeepSpeed
        if not distributed.is_initialized():
            backend = get_accelerator().communication_backend_name()
            distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    with without_deprecations():
        deepspeed.init_distributed()


def leave() -> None:
    """Destroy the process group, if one was joined. Call it last: no other function here works afterwards."""
    if distributed.is_initialized():
        deepspeed.comm.destroy_process_group()


def rank() -> int:
    """The number of this process among all ranks, from 0."""
    return distributed.get_rank() if distributed.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """The number of ranks."""
    return distributed.get_world_size() if distributed.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def reduce(values: Tensor, operation: distributed.ReduceOp.RedOpType) -> Tensor:
    """The elementwise reduction over all ranks' values, on the accelerator. Every rank must call it."""
    values = values.to(get_accelerator().current_device_name())
    distributed.all_reduce(values, op=operation)
    return values


def sum_over_ranks(values: Sequence[float]) -> tuple[float, ...]:
    """The elementwise sums over all ranks' values. Every rank must call it, with equally many values."""
    join()
    return tuple(reduce(torch.tensor(values, dtype=torch.float64), distributed.ReduceOp.SUM).tolist())


def gather(value: T) -> list[T]:
    """The values of all ranks, in rank order, on every rank. They are pickled."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    distributed.all_gather_object(values, value)
    return values


def from_first(value: T) -> T:
    """Rank 0's value, on every rank."""
    return gather(value)[0]


def barrier() -> None:
    """Wait until every rank has called it."""
    gather(None)


def any_rank(flag: bool) -> bool:
    """Whether the flag is true on any rank."""
    return any(gather(flag))
