"""Samplers: what answers a prompt with token ids, and what it may do besides. Standard library only."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import Generation, SamplingParams

# (name as in the model's state dict, torch.Tensor): Any keeps torch out of this folder
NamedTensors = Iterable[tuple[str, Any]]


class Sampler(Protocol):
    """Samples replies. Token ids in, token ids out."""

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """One reply to one prompt. Log-probabilities are those of the distribution sampled from.

        Requests that wait at the same time may be served together; the result of one must not depend on the others.
        """

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Take the learner's weights after optimiser step ``version``. No request may be under way."""

    @property
    def version(self) -> int:
        """The optimiser step whose weights are in use."""

    def close(self) -> None:
        """Free memory, processes and connections. May be called twice."""


@runtime_checkable
class SleepingSampler(Protocol):
    """A sampler that can give memory back while the learner works."""

    def sleep(self, *, keep_weights: bool) -> None:
        """Free memory until the next ``update_weights`` or ``sample``, which wakes the sampler by itself.

        Without ``keep_weights`` it may drop its weights, and can sample again only after ``update_weights``.
        """


@runtime_checkable
class TakesAdapters(Protocol):
    """A sampler that may take LoRA adapters under PEFT's names in ``update_weights``, beside base weights that stay."""

    @property
    def takes_adapters(self) -> bool:
        """Whether it takes the adapters alone; otherwise base and adapters merged."""


@runtime_checkable
class StagesWeights(Protocol):
    """A sampler that can prepare an update of its weights while it samples with the old ones."""

    def stage_weights(self, named_tensors: NamedTensors, version: int) -> Callable[[], None]:
        """Prepare an update; the call that it returns makes it, and no request may be under way then.

        ``update_weights`` does both. The learner's weights do not change in between.
        """


@runtime_checkable
class DescribesSettings(Protocol):
    """A sampler that chose settings by itself."""

    def describe(self) -> str:
        """The settings that it chose, as one line of the log."""


@runtime_checkable
class LogprobSampler(Protocol):
    """A sampler that can say how probable a given reply is to its model. Optional: samplers may do without."""

    async def measure(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[float]:
        """log π(output_ids[i] | prompt_ids, output_ids[:i]) for every i, (A,) nats at temperature 1."""


@runtime_checkable
class RepliesToMessages(Protocol):
    """A sampler that is given messages in place of token ids, such as a chat endpoint: one that does not train."""

    async def reply(self, messages: Sequence[Message], params: SamplingParams) -> Generation:
        """One reply, whose token ids are those of its text and have no log-probabilities."""


@runtime_checkable
class ReachedByUrl(Protocol):
    """A sampler whose model runs elsewhere: rollout workers open clients of their own (``rollout.workers``)."""

    def client(self) -> Callable[[], Sampler]:
        """A call, which can be pickled, that opens a client of the model with the weights in use now."""


@runtime_checkable
class ChecksTraining(Protocol):
    """A sampler that may refuse to train. A static method: it is called before the sampler is built."""

    def check_training(self) -> None:
        """Raise ``ValueError`` if no policy can be trained with it."""


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


@runtime_checkable
class AttentionSampler(Protocol):
    """A sampler that can return its model's attention. Optional: samplers may do without."""

    async def attend(self, query: AttentionQuery) -> TokenAttention:
        """The attention of one query, under the weights in use."""
