"""A sampler for runs of the command line: the default one, which refuses new weights while it is asked for replies.

`sampler.name=tests/watching_sampler.py:WatchingSampler`
"""

from collections.abc import Sequence

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols import NamedTensors
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.samplers.transformers import TransformersSampler


class WatchingSampler(TransformersSampler):
    """Knows how many requests are under way."""

    under_way = 0

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """As the default, and counted."""
        self.under_way += 1
        try:
            return await super().sample(prompt_ids, params)
        finally:
            self.under_way -= 1

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """As the default, between batches alone."""
        if self.under_way:
            raise SamplerError(f"updating the sampler's weights: {self.under_way} requests are under way.")
        super().update_weights(named_tensors, version)
