"""The data types of weights, by the names that options give them."""

from collections.abc import Mapping
from typing import Literal

import torch

from condensegrpo.learner.settings import Dtype

DtypeName = Literal["float32", "bfloat16", "float16"]  # float16 is of samplers only: see settings.Dtype
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
    """What a run on a GPU (``gpu_bfloat16``) that does not train in bfloat16 says; None: nothing."""
    if dtype == "bfloat16" or bfloat16 is None:
        return None
    return f"WARNING: training in {dtype} on a GPU, with twice the memory of bfloat16 and a fraction of its speed: " + (
        f"model.dtype={dtype} is set. Leave it out, or set model.dtype=bfloat16"
        if bfloat16
        else "this GPU does not compute in bfloat16, which NVIDIA's do from compute capability 8.0 on"
    )
