"""The process group of the ranks and what they exchange besides gradients.

Gradients travel over NCCL where there are GPUs. Everything here but ``reduce`` travels through main memory, over gloo
groups of their own: ranks come to these calls at different times, when one still samples, evaluates or writes, and only
a wait of ``timeout_minutes`` ends the run. All ranks must make the same calls; a single process may make them too.

Importing this file imports no DeepSpeed.
"""

import atexit
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor, distributed
from torch.distributed import HashStore, distributed_c10d  # type: ignore[attr-defined]  # HashStore: not in the stubs

from condensegrpo.core.errors import CondenseError
from condensegrpo.learner.devices import device_memory
from condensegrpo.learner.launchers import device_index
from condensegrpo.learner.settings import TIMEOUT_MINUTES

# sets the timeout of a group, by default of all ranks; public since torch 2.14
set_timeout = getattr(distributed, "set_timeout", distributed_c10d._set_pg_timeout)
T = TypeVar("T")
Thread = Literal["main", "saving"]  # each exchanges through its own gloo group, since collectives are ordered

_gloo: dict[Thread, distributed.ProcessGroup] = {}  # none where there is one process


def join(timeout_minutes: float = TIMEOUT_MINUTES) -> None:
    """Join the ranks' process group: the launcher's, or a group of one process. Gloo on a CPU, NCCL on GPUs.

    A group that already exists, such as one that a sampler created, is joined as it is.

    Args:
        timeout_minutes: longest wait of a rank for the others, in any collective operation; only the first call counts.
    """
    from condensegrpo.learner.deepspeed_import import deepspeed, get_accelerator, without_deprecations

    if deepspeed.comm.is_initialized():
        return
    timeout, excepthook = timedelta(minutes=timeout_minutes), sys.excepthook
    # Without this entry DeepSpeed compiles a shared-memory all-reduce with g++ and ninja, which only inference uses.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    if "RANK" not in os.environ:
        os.environ.setdefault("LOCAL_RANK", "0")  # required by DeepSpeed
        if not distributed.is_initialized():
            backend = get_accelerator().communication_backend_name()
            distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    get_accelerator().set_device(choose_device())
    with without_deprecations():
        deepspeed.init_distributed(timeout=timeout)
    if world_size() == 1:
        sys.excepthook = excepthook  # torch's writes [rank0] before every line of a traceback
        atexit.register(leave)
    else:
        threads: tuple[Thread, ...] = ("main", "saving")
        _gloo.update({thread: distributed.new_group(backend="gloo", timeout=timeout) for thread in threads})
    set_timeout(timeout)


def set_timeouts() -> None:
    """Give every process group the timeout that ``join`` gave the group of all ranks.

    DeepSpeed creates its groups with torch's timeout, 10 minutes for NCCL, whatever it was initialised with.
    """
    limit = timeout_of(distributed_c10d._get_default_group())
    for group in distributed_c10d._world.pg_map:
        set_timeout(limit, group)


def timeout_of(group: distributed.ProcessGroup) -> timedelta:
    """How long a collective operation of a group may take, the wait for its last rank included."""
    limit: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return limit


def least_device_memory() -> int | None:
    """Bytes of the smallest of the ranks' devices; None: they have no GPU."""
    return min((size for size in gather(device_memory()) if size is not None), default=None)


def choose_device() -> int:
    """The index of this process's device. Sets LOCAL_RANK to it, from which DeepSpeed and vLLM read that index."""
    index = device_index(int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count())
    os.environ["LOCAL_RANK"] = str(index)
    return index


def leave() -> None:
    """Destroy the process group, if one was joined.

    Call it last: no other function here works afterwards, and DeepSpeed opens no engine in this process again.

    A single process does so at its exit, since NCCL warns if it has not. Several ranks call it together: in one that
    failed it could wait for the others.
    """
    if distributed.is_initialized():
        _gloo.clear()
        distributed.destroy_process_group()


def rank() -> int:
    """The number of this process among all ranks, from 0."""
    return distributed.get_rank() if distributed.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """The number of ranks."""
    return distributed.get_world_size() if distributed.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def reduce(values: Tensor, operation: distributed.ReduceOp.RedOpType) -> Tensor:
    """The elementwise reduction over all ranks' values, on the accelerator: only where all ranks are known to be."""
    from condensegrpo.learner.deepspeed_import import get_accelerator

    values = values.to(get_accelerator().current_device_name())
    distributed.all_reduce(values, op=operation)
    return values


def sum_over_ranks(values: Sequence[float]) -> tuple[float, ...]:
    """The elementwise sums over all ranks' values. Every rank must call it, with equally many values."""
    return tuple(float(sum(column)) for column in zip(*gather(tuple(values)), strict=True))


def gather(value: T, thread: Thread = "main") -> list[T]:
    """The values of all ranks, in rank order, on every rank. They are pickled."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    distributed.all_gather_object(values, value, group=_gloo.get(thread))
    return values


def on_every_rank(call: Callable[[], T], thread: Thread = "main") -> list[T]:
    """The results of a call by rank; if it fails on one, every rank raises that error and none waits for another."""
    outcome: tuple[CondenseError | None, T | None]
    try:
        outcome = (None, call())
    except CondenseError as caught:
        outcome = (caught, None)
    outcomes = gather(outcome, thread)
    error = next((failed for failed, _ in outcomes if failed is not None), None)
    if error is not None:
        raise error
    return [cast(T, result) for _, result in outcomes]


def from_first(value: T) -> T:
    """Rank 0's value, on every rank."""
    return gather(value)[0]


def barrier() -> None:
    """Wait until every rank has called it."""
    gather(None)


def any_rank(flag: bool) -> bool:
    """Whether the flag is true on any rank."""
    return any(gather(flag))


def machine() -> str:
    """An identifier that all processes of a machine have in common; a container is a machine of its own.

    It is the host name, the boot of the kernel and the file system of the shared memory: containers may have one host
    name, on one machine or on several, or share their memory.
    """
    boot, memory = Path("/proc/sys/kernel/random/boot_id"), Path("/dev/shm")
    kernel = boot.read_text(encoding="ascii").strip() if boot.exists() else ""
    return f"{socket.gethostname()} {kernel} {memory.stat().st_dev if memory.exists() else 0}"


def machines() -> list[str]:
    """The machines of all ranks, in rank order. Every rank must call it."""
    return gather(machine())
