"""The default sampler, whose first replies of every trajectory are given: their probabilities are the model's."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.samplers.transformers import TransformersSampler


class CallingSampler(TransformersSampler):
    """Says ``reply`` in the first turns of a trajectory, and samples the others."""

    def __init__(self, model_path: str, *, reply: list[int], turns: int = 2) -> None:
        """``reply``: ids, which end in a stop id."""
        super().__init__(model_path)
        self._reply, self._turns, self._played = tuple(reply), turns, Counter[str]()

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """The given reply, or one that is sampled."""
        self._played[params.trajectory] += 1
        if self._played[params.trajectory] > self._turns:
            return await super().sample(prompt_ids, replace(params, max_tokens=6))
        logprobs = tuple(await self.score(prompt_ids, self._reply))
        return Generation(token_ids=self._reply, logprobs=logprobs, finish=FinishReason.STOP)
