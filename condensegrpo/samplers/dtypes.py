"""The number formats of a sampler's model."""

from typing import Literal

import torch

DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
