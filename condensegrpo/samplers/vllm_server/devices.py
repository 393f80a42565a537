"""Which devices the servers of a run get: none that a rank of the learner computes on, and none twice.

visible   0 1 2 3 4 5 6 7        two ranks, each with one server of tensor_parallel_size 3
learner   0 1
servers       2 3 4|5 6 7
"""

import os
import socket

import torch

from condensegrpo.core.errors import SamplerError
from condensegrpo.learner.ranks import gather, rank
from condensegrpo.samplers.vllm_server.settings import ServerSettings

MASK = "CUDA_VISIBLE_DEVICES"


def server_devices(
    visible: tuple[str, ...], *, ranks: int, rank: int, replicas: int, each: int
) -> tuple[str | None, ...]:
    """``CUDA_VISIBLE_DEVICES`` of every server that a rank starts; None: that of the rank.

    One process with one device shares it with one server. Where no device is visible, servers run on the CPU.

    Args:
        visible: names of the devices, as numbers or UUIDs. The ranks of this machine compute on the first ones.
        ranks: of the learner on this machine.
        rank: this one among them, from 0.
        replicas: servers of every rank.
        each: devices of a server (``tensor_parallel_size``).

    Raises:
        SamplerError: there are fewer devices than learner and servers need.
    """
    if not visible or (ranks == replicas == each == len(visible) == 1):
        return (None,) * replicas
    needed = ranks + ranks * replicas * each
    if needed > len(visible):
        raise SamplerError(
            f"starting {replicas} servers for each of {ranks} ranks on this machine: found {len(visible)} devices "
            f"({', '.join(visible)}), wanted {needed}: {ranks} for the learner and {replicas} x {each} for the servers "
            f"of each rank. Show every rank all devices, start fewer servers (sampler.options.replicas, "
            f"server.tensor_parallel_size), name devices to share (server.devices), or start the servers apart from "
            f"the run: condensegrpo serve, sampler.options.urls."
        )
    first = ranks + rank * replicas * each
    return tuple(",".join(visible[start : start + each]) for start in range(first, first + replicas * each, each))


def visible_devices(mask: str | None, count: int) -> tuple[str, ...]:
    """Names of the devices that this process sees, as a mask for another process can repeat them.

    CUDA reads a mask up to its first invalid entry, such as -1; ``count`` is the number that it found.
    """
    if mask is None:
        return tuple(map(str, range(count)))
    return tuple(name.strip() for name in mask.split(",")[:count])


def devices_of(settings: ServerSettings, replicas: int) -> tuple[str | None, ...]:
    """The devices of this rank's servers: those that are set, or free ones. Every rank must call it."""
    machines = gather(socket.gethostname())
    if settings.devices:
        return settings.devices
    own = machines[rank()]
    return server_devices(
        visible_devices(os.environ.get(MASK), torch.cuda.device_count()),
        ranks=machines.count(own),
        rank=machines[: rank()].count(own),
        replicas=replicas,
        each=settings.tensor_parallel_size,
    )
