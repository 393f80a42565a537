"""The only place that imports DeepSpeed: chooses its accelerator first, and suppresses its warnings and output."""

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.abc import MetaPathFinder
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise the import of DeepSpeed warns that there is no GPU


class _WithoutMlflow(MetaPathFinder):
    """DeepSpeed's autotuner, which is not used here, would spend two seconds on importing MLflow if it is installed."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "mlflow":
            raise ModuleNotFoundError("hidden from DeepSpeed")


sys.meta_path.insert(0, without_mlflow := _WithoutMlflow())
try:
    import deepspeed as deepspeed
    from deepspeed import DeepSpeedEngine as DeepSpeedEngine
    from deepspeed.accelerator import get_accelerator as get_accelerator
finally:
    sys.meta_path.remove(without_mlflow)

_LINEAR = nn.functional.linear  # which ZeRO 3 replaces for the whole process

_WARNINGS = (  # raised inside DeepSpeed and torch's compiler, out of this package's control
    (DeprecationWarning, r"`torch\.jit\.script_method` is deprecated"),
    (FutureWarning, r"`torch\.distributed\.\w+` is deprecated"),
    (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed"),
)


@contextmanager
def without_deprecations() -> Iterator[None]:
    """Suppress the warnings that DeepSpeed and compiled layers trigger in torch."""
    with warnings.catch_warnings():
        for category, message in _WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
        yield


@contextmanager
def without_output() -> Iterator[None]:
    """``without_deprecations``, and without the memory report that DeepSpeed prints when it trains in bfloat16."""
    with without_deprecations(), redirect_stdout(io.StringIO()):
        yield


def restore_linear() -> None:
    """Undo what ZeRO 3 leaves behind: a ``torch.nn.functional.linear`` that torch cannot compile."""
    nn.functional.linear = _LINEAR


def exchanging_heads(attention: Callable[..., Tensor], group: ProcessGroup) -> nn.Module:
    """Attention of (1, S, h/k, d) as attention of (1, S/k, h, d) on each of the k ranks of a group, by all-to-all."""
    from deepspeed.sequence.layer import DistributedAttention  # only sequence parallelism needs it

    return cast(nn.Module, DistributedAttention(attention, group, scatter_idx=2, gather_idx=1))
