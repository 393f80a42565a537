"""Samplers that return the attention of their model. Standard library only."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


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
class Attends(Protocol):
    """A sampler that can return its model's attention. Optional: samplers may do without."""

    async def attend(self, query: AttentionQuery) -> TokenAttention:
        """The attention of one query, under the weights in use."""
