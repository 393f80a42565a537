"""The sampler of a rank, as a worker sees it: every call is a request to the rank, by token ids."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import cast

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.failures import Failure
from condensegrpo.core.protocols import AttentionQuery, NamedTensors, TokenAttention
from condensegrpo.core.shared_sequence import shared_ids
from condensegrpo.core.trajectory import Generation, SamplingParams, Stop
from condensegrpo.episodes.boundary import Ended
from condensegrpo.episodes.workers.messages import (
    Attend,
    Measure,
    Message,
    Sample,
    SampledIds,
    SamplerRequest,
    Withdraw,
)


class RemoteSampler:
    """A ``Sampler`` that also measures and attends, if the rank's sampler does: the rank checks that before.

    Of a prompt that continues the last prompt of its trajectory only the new ids are sent.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self.version = 0  # of the rank's sampler, as of the last ``Play``
        self._send = send
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[object]] = {}
        self._prompts: dict[str, Sequence[int]] = {}  # the last one, by id of the trajectory

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply of the rank's sampler.

        Raises:
            Ended: the sampler failed; with its own failure, so that place and traceback are of the rank.
        """
        prompt, last = shared_ids(prompt_ids), self._prompts.get(params.trajectory)
        kept = len(last) if last is not None and prompt.continues(last) else 0
        self._prompts[params.trajectory] = prompt
        answer = await self._asked(Sample(kept, array("I", prompt[kept:]), params))
        if isinstance(answer, Failure):
            raise Ended.by(answer, Stop.SAMPLER_ERROR)
        token_ids, logprobs, finish = cast(SampledIds, answer)
        return Generation(token_ids=tuple(token_ids), logprobs=tuple(logprobs), finish=finish)

    async def measure(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[float]:
        """log π(output_ids[i] | prompt_ids, output_ids[:i]) for every i, (A,) nats at temperature 1.

        Raises:
            SamplerError: the sampler failed.
        """
        answer = await self._asked(Measure(array("I", prompt_ids), array("I", output_ids)))
        return tuple(cast("array[float]", _checked(answer)))

    async def attend(self, query: AttentionQuery) -> TokenAttention:
        """The attention of one query.

        Raises:
            SamplerError: the sampler failed.
        """
        return await self.attend_with("", query)

    async def attend_with(self, model: str, query: AttentionQuery) -> TokenAttention:
        """The attention of a frozen model that the rank holds; raises as ``attend``."""
        return cast(TokenAttention, _checked(await self._asked(Attend(model, query))))

    def answered(self, number: int, value: object) -> None:
        """Receive the answer to a request."""
        future = self._answers.get(number)
        if future is not None and not future.done():
            future.set_result(value)

    def forget(self, trajectory: str) -> None:
        """Forget the prompts of a trajectory, as the rank does when it is scored."""
        self._prompts.pop(trajectory, None)

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """The rank updates its sampler by itself."""
        raise NotImplementedError("a rollout worker holds no weights")

    def close(self) -> None:
        """Nothing is held."""

    async def _asked(self, call: Sample | Measure | Attend) -> object:
        number = next(self._numbers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(SamplerRequest(number, call))
        try:
            return await future
        except asyncio.CancelledError:
            self._send(Withdraw(number))
            raise
        finally:
            del self._answers[number]


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A frozen model of the rank, for a scorer."""

    name: str
    sampler: RemoteSampler
    version: int = 0  # it never changes

    async def attend(self, query: AttentionQuery) -> TokenAttention:
        """The attention of one query; raises as ``RemoteSampler.attend``."""
        return await self.sampler.attend_with(self.name, query)


def _checked(answer: object) -> object:
    if isinstance(answer, Failure):
        raise SamplerError(answer.message)
    return answer
