"""A sampler for runs of the command line: the default one, which refuses new weights while it is asked for replies.

Its second batch, which is sampled while the learner takes the first step, waits for the weights to be staged.

`sampler.name=tests/watching_sampler.py:WatchingSampler`
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols.sampler import NamedTensors
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.samplers.transformers import TransformersSampler


class WatchingSampler(TransformersSampler):
    """Knows how many requests are under way."""

    under_way = 0
    staged = threading.Event()

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """As the default, and counted."""
        self.under_way += 1
        try:
            if params.trajectory.startswith("2/") and not await asyncio.to_thread(self.staged.wait, 60):
                raise SamplerError("no weights were staged while the second batch was sampled")
            return await super().sample(prompt_ids, params)
        finally:
            self.under_way -= 1

    def stage(self, named_tensors: NamedTensors, version: int) -> Callable[[], None]:
        """Copy the weights."""
        copies = [(name, tensor.clone()) for name, tensor in named_tensors]
        self.staged.set()
        return partial(self.update, copies, version)

    def update(self, named_tensors: NamedTensors, version: int) -> None:
        """As the default, between batches alone."""
        if self.under_way:
            raise SamplerError(f"updating the sampler's weights: {self.under_way} requests are under way.")
        super().update(named_tensors, version)
