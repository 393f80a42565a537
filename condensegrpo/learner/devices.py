"""The accelerator as threads see it: each has a current device, at first the device 0, and a current stream."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

gpu: Any = torch.cuda  # tests replace it


def on_this_device() -> Callable[[], None]:
    """A function for the start of another thread: it makes the current device of this thread that thread's device."""
    if not gpu.is_available():
        return _nothing
    return partial(gpu.set_device, gpu.current_device())


@contextmanager
def stream_restored() -> Iterator[None]:
    """Restore the thread's stream after code that may change it, once the device has done the work of that code.

    vLLM gives every thread that calls it a stream of its own, on which the learner's work would not wait for the
    former stream's.
    """
    if not gpu.is_available():
        yield
        return
    stream = gpu.current_stream()
    try:
        yield
    finally:
        gpu.synchronize()
        gpu.set_stream(stream)


def _nothing() -> None:
    pass
