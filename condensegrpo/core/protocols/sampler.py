"""Samplers: what answers a prompt with token ids, and what it may do besides. Standard library only."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import Generation, SamplingParams

# (name as in the model's state dict, torch.Tensor): Any keeps torch out of this folder
NamedTensors = Iterable[tuple[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionQuery:
    """A prompt, and the tokens whose attention to it is captured."""

    prompt_ids: tuple[int, ...]  # (P,) the prompt
    positions: tuple[int, ...] = ()  # in the prompt, whose attention counts too, such as those of the last output
    question_ids: tuple[int, ...]  # after the prompt: the question once more; at least one
    calibration_ids: tuple[int, ...]  # after the prompt, without sight of the question: no content; at least one
    layers: tuple[int, ...] = ()  # counted from 0; (): a few from the middle to near the end
    media: tuple[str, ...] = ()  # the hashes of the pictures in the prompt, in order

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.question_ids or not self.calibration_ids:
            raise ValueError(
                f"an attention query needs a prompt, a question and a calibration: found {len(self.prompt_ids)}, "
                f"{len(self.question_ids)} and {len(self.calibration_ids)} tokens"
            )
        if not all(0 <= position < len(self.prompt_ids) for position in self.positions):
            raise ValueError(
                f"attention of the positions {self.positions} in a prompt of {len(self.prompt_ids)} tokens"
            )

    @property
    def length(self) -> int:
        """Tokens that the model reads: the prompt and both branches."""
        return len(self.prompt_ids) + len(self.question_ids) + len(self.calibration_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAttention:
    """How much attention every prompt token of an attention query gets: means over layers, heads and query tokens."""

    question: tuple[float, ...]  # (P,) half from the question, half from the ``positions`` if any; at most 1 together
    calibration: tuple[float, ...]  # (P,) from the calibration


class Sampler:
    """Samples replies. Token ids in, token ids out."""

    version: int = 0  # the optimiser step whose weights are in use
    takes_adapters: bool = False  # LoRA adapters alone in ``update``, under PEFT's names; else merged weights

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply to one prompt. Log-probabilities are those of the distribution sampled from.

        Requests that wait at the same time may be served together; the result of one must not depend on the others.
        """
        raise NotImplementedError

    def update(self, named_tensors: NamedTensors, version: int) -> None:
        """Take the learner's weights after optimiser step ``version``. No request may be under way."""
        raise NotImplementedError

    def stage(self, named_tensors: NamedTensors, version: int) -> Callable[[], None]:
        """Prepare an update while it samples with the old weights; no request may be under way when the call that this
        returns makes it. ``update`` does both. The learner's weights do not change in between.
        """
        raise NotImplementedError

    def sleep(self, *, keep_weights: bool) -> None:
        """Free memory until the next ``update`` or ``sample``, which wakes the sampler by itself.

        Without ``keep_weights`` it may drop its weights, and can sample again only after ``update``.
        """

    def close(self) -> None:
        """Free memory, processes and connections. May be called twice."""

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[float]:
        """log π(output_ids[i] | prompt_ids, output_ids[:i]) for every i, (A,) nats at temperature 1."""
        raise NotImplementedError

    async def attend(self, query: AttentionQuery) -> TokenAttention:
        """The model's attention to a query, under the weights in use."""
        raise NotImplementedError

    async def reply(self, messages: Sequence[Message], params: SamplingParams) -> Generation:
        """In place of ``sample``, of an endpoint that takes messages: one that does not train.

        The token ids are those of its text and have no log-probabilities.
        """
        raise NotImplementedError

    def client(self) -> "Callable[[], Sampler]":
        """A call, which can be pickled, that opens a client of the model with the weights in use now.

        Only of a model that runs elsewhere: rollout workers open clients of their own (``rollout.workers``).
        """
        raise NotImplementedError

    def describe(self) -> str:
        """The settings that it chose by itself, as one line of the log; empty: none."""
        return ""

    @staticmethod
    def check_training() -> None:
        """Raise ``ValueError`` if no policy can be trained with it; called before the sampler is built."""
