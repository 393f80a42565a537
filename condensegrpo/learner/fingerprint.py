"""A hash of the policy that an engine trains, by which a checkpoint recognises the engine that may load it."""

import hashlib

import torch
from torch import Tensor

from condensegrpo.learner.engine import DeepSpeedEngine
from condensegrpo.learner.ranks import rank
from condensegrpo.learner.weights import whole

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers as wide as a number, in bytes


@torch.no_grad()
def fingerprint(engine: DeepSpeedEngine) -> str:
    """A hash of the names and shapes of all weights, and of the values of those that are frozen.

    Every rank must call it, and the first one's is the answer: under ZeRO 3 weights are gathered, a module at a time.
    Without frozen weights nothing is gathered or read.
    """
    digest = hashlib.sha256()
    policy = engine.module.policy
    for name, part in policy.named_modules():
        own = dict(part.named_parameters(recurse=False))
        frozen = [tensor for tensor in own.values() if not tensor.requires_grad]
        with whole(engine, frozen):
            for label, tensor in own.items():
                shape = tuple(tensor.ds_shape) if engine.zero_optimization_stage() == 3 else tuple(tensor.shape)
                digest.update(f"{name}.{label} {shape}\n".encode())
                if not tensor.requires_grad and rank() == 0:
                    digest.update(str(_checksum(tensor)).encode())
    return digest.hexdigest()


def _checksum(tensor: Tensor) -> int:
    """The sum of the tensor's bits, read as whole numbers: exact, and the same on any device and in any order."""
    return int(tensor.view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64))
