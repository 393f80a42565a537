"""The deterministic fake of a sampler: scripted replies. Needs no torch and no model."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols.sampler import NamedTensors, Sampler
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams

Agent = Callable[[tuple[int, ...]], Sequence[int]]  # prompt ids → output ids


class ScriptedSampler(Sampler):
    """Replies from a list, one after another in the order of the calls, or from a function of the prompt.

        ScriptedSampler([[5, 6, 2], [7, 2]])             # the first call gets 5 6 2, the second 7 2, the third an error
        ScriptedSampler(lambda prompt_ids: [len(prompt_ids), 2])

    As with a real sampler a reply ends with the first stop id in it, which is kept, or is cut off at max_tokens.
    Temperature, seed and stop strings have no effect.
    """

    def __init__(
        self,
        replies: Sequence[Sequence[int]] | Agent,
        *,
        logprob: float = -0.5,
        seconds: float | Callable[[tuple[int, ...]], float] = 0.0,
    ) -> None:
        """Set the script.

        Args:
            replies: token ids of each reply, or a function of the prompt that returns them. Its errors are not caught.
            logprob: of every token, in nats, at most 0.
            seconds: duration of a reply, or a function of the prompt that returns it.
        """
        if logprob > 0:
            raise ValueError(f"a log-probability is at most 0, found logprob={logprob}")
        self._agent = replies if callable(replies) else _read_out(iter(replies))
        self._logprob = logprob
        self._seconds = seconds
        self.version = 0  # of the last update

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """The next reply of the script."""
        prompt = tuple(prompt_ids)
        reply = tuple(self._agent(prompt))  # before the wait: replies of a list follow the order of the calls
        await asyncio.sleep(self._seconds(prompt) if callable(self._seconds) else self._seconds)
        stop = next((index for index, token in enumerate(reply) if token in params.stop_ids), None)
        output = reply[: params.max_tokens] if stop is None else reply[: min(stop + 1, params.max_tokens)]
        stopped = len(output) < params.max_tokens or (stop is not None and stop < params.max_tokens)
        return Generation(
            token_ids=output,
            logprobs=(self._logprob,) * len(output),
            finish=FinishReason.STOP if stopped else FinishReason.LENGTH,
        )

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Iterate over all tensors, as a real sampler would, and record the version."""
        for _ in named_tensors:
            pass
        self.version = version

    def close(self) -> None:
        """There is nothing to free."""


def _read_out(replies: Iterator[Sequence[int]]) -> Agent:
    """An agent that returns one reply after another, whatever the prompt."""

    def reply(prompt_ids: tuple[int, ...]) -> Sequence[int]:
        following = next(replies, None)
        if following is None:
            raise SamplerError(
                f"sampling a reply to a prompt of {len(prompt_ids)} tokens: the script has no further reply. Give "
                f"ScriptedSampler one reply per call, or a function."
            )
        return following

    return reply
