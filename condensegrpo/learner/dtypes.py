"""The data types of weights, by the names that options give them."""

from collections.abc import Mapping
from typing import Literal

import torch

DtypeName = Literal["float32", "bfloat16", "float16"]  # float16 is of samplers only: see settings.Dtype
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
