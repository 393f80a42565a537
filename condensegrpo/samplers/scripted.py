"""The public fake of a sampler: says what it is told, the same every time. Needs no torch and no model."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.protocols import NamedTensors
from condensegrpo.core.trajectory import Finish, Generation, SamplingParams

Agent = Callable[[tuple[int, ...]], Sequence[int]]  # prompt ids → output ids


class ScriptedSampler:
    """Replies from a list, one after another in the order of the calls, or from a function of the prompt.

        ScriptedSampler([[5, 6, 2], [7, 2]])             # the first call gets 5 6 2, the second 7 2, the third an error
        ScriptedSampler(lambda prompt_ids: [len(prompt_ids), 2])

    A reply is treated as a real sampler would treat it: it ends with the first stop id in it (which stays), and at
    max_tokens, where it counts as cut off. Temperature, seed and stop strings do nothing.
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
            replies: token ids of each reply, or a function that gives them for a prompt. Errors pass.
            logprob: of every token, in nats, at most 0.
            seconds: that a reply takes, or a function that gives them for a prompt.
        """
        if logprob > 0:
            raise ValueError(f"a log-probability is at most 0, found logprob={logprob}")
        self._agent = replies if callable(replies) else _read_out(iter(replies))
        self._logprob = logprob
        self._seconds = seconds
        self._version = 0

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """The next reply of the script.

        Raises:
            SamplerError: the list has no further reply.
        """
        prompt = tuple(prompt_ids)
        reply = tuple(self._agent(prompt))  # before the wait: replies of a list go out in the order of the calls
        await asyncio.sleep(self._seconds(prompt) if callable(self._seconds) else self._seconds)
        stop = next((place for place, token in enumerate(reply) if token in params.stop_ids), None)
        output = reply[: params.max_tokens] if stop is None else reply[: min(stop + 1, params.max_tokens)]
        stopped = len(output) < params.max_tokens or (stop is not None and stop < params.max_tokens)
        return Generation(
            token_ids=output,
            logprobs=(self._logprob,) * len(output),
            finish=Finish.STOP if stopped else Finish.LENGTH,
        )

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Look at every tensor, as a real sampler would, and take the version."""
        for _ in named_tensors:
            pass
        self._version = version

    @property
    def version(self) -> int:
        """The version of the last update; 0 before the first."""
        return self._version

    def close(self) -> None:
        """Nothing is held."""


def _read_out(replies: Iterator[Sequence[int]]) -> Agent:
    """An agent that gives one reply after another, whatever the prompt."""

    def reply(prompt_ids: tuple[int, ...]) -> Sequence[int]:
        found = next(replies, None)
        if found is None:
            raise SamplerError(
                f"sampling a reply to a prompt of {len(prompt_ids)} tokens: the script has come to its end. Give "
                f"ScriptedSampler one reply for every call, or a function."
            )
        return found

    return reply
