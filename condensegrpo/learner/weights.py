"""The learner's weights under their Hugging Face names, for samplers and for export."""

from collections.abc import Iterator
from contextlib import ExitStack

import deepspeed
from deepspeed import DeepSpeedEngine
from torch import Tensor

from condensegrpo.learner.deepspeed import quiet
from condensegrpo.learner.logprobs import TrainedLogprobs


def gathered(engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
    """The policy's weights, (name in its ``state_dict``, tensor), one module at a time; every rank must exhaust it.

    Under ZeRO 3 a module's weights are gathered from all ranks for as long as they are given out and no longer: the
    whole model never lies in one place. A tensor is the learner's own and not a copy: copy it before taking the next.
    A weight with two names (tied embeddings) comes once, under the first, which is the name that vLLM and
    transformers load.
    """
    module: TrainedLogprobs = engine.module
    policy = module.policy
    names = {id(tensor): name for name, tensor in policy.named_parameters()}
    for part in policy.modules():
        own = [tensor for tensor in part.parameters(recurse=False) if id(tensor) in names]
        with ExitStack() as stack:
            if own and engine.zero_optimization_stage() == 3:
                with quiet():
                    stack.enter_context(deepspeed.zero.GatheredParameters(own))
            for tensor in own:
                yield names.pop(id(tensor)), tensor.detach()
    kept = policy.state_dict().keys()
    yield from ((name, buffer) for name, buffer in policy.named_buffers() if name in kept)
