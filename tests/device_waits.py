"""Counts what would make the host wait for a device: `from device_waits import DeviceWaits`."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# the host reads a number, or how large the result is
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "equal")


class DeviceWaits(TorchDispatchMode):
    """While it is active it counts operations, those of backward included, on whatever device they are.

    On the meta device, which has no data to read, most of them fail as well; so does ``tolist``, which is no operation
    on a CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = Counter[str]()  # by operation
        self.uploads = 0  # copies from main memory to a device
        self.pinned = 0  # of those, asynchronous ones from memory that was allocated as pinned
        self._pinned = set[int]()  # addresses of such memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        counts_itself = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in READS or by_mask or counts_itself:
            self.waits[name] += 1
        made = func(*args, **{**kwargs, **({"pin_memory": False} if kwargs.get("pin_memory") else {})})
        if name == "empty" and kwargs.get("pin_memory"):  # without a device there is nothing to pin it for
            self._pinned.add(made.data_ptr())
        if name in ("_to_copy", "copy_"):
            source = args[0] if name == "_to_copy" else args[1]
            places = [tensor.device.type for tensor in (source, *tree_leaves(made)) if isinstance(tensor, Tensor)]
            self.waits["download"] += places[0] != "cpu" == places[-1]
            upload = places[0] == "cpu" != places[-1]
            self.uploads += upload
            self.pinned += upload and bool(kwargs.get("non_blocking")) and source.data_ptr() in self._pinned
        return made
