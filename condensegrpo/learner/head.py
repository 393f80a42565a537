"""The LM head on some positions, without a [tokens × vocabulary] tensor.

    hidden states (T, H) ─▶ LM head, chunk by chunk ─▶ log π (T,), and the entropy (T,) where it is asked for

Legend: T trained tokens, _t those of a chunk, H hidden size, V vocabulary.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 2**25  # logits that exist at a time: 128 MB in fp32


class Predicted(NamedTuple):
    """What the model says of the trained tokens."""

    logp_T: Tensor  # float32, nats, with gradient
    entropy_T: Tensor | None = None  # float32, nats, of the whole distribution; no gradient. None: it was not asked for


class ChunkedHead(nn.Module):
    """The LM head on some positions: hidden states in, log-probabilities of given tokens out.

    Its chunks are recomputed in backward. ZeRO-3 treats it as one leaf: the weight is gathered once, however many
    chunks a rank has, so that ranks with different numbers of trained tokens stay in step.
    """

    def __init__(self, lm_head: nn.Module, *, softcap: float | None, vocabulary: int) -> None:
        super().__init__()
        self.lm_head = lm_head
        self.softcap = softcap
        self.chunk_tokens = max(1, CHUNK_LOGITS // vocabulary)

    def forward(self, hidden: Tensor, target: Tensor, temperature: float, entropy: bool = False) -> Predicted:
        """What comes after ``hidden`` (T, H) at ``temperature``, ``target`` (T,) in particular.

        Args:
            entropy: whether to compute that too; it costs a second product with the head's weight, in forward only.
        """
        hidden_c, target_c = torch.split(hidden, self.chunk_tokens), torch.split(target, self.chunk_tokens)
        chunks = list(zip(hidden_c, target_c, strict=True))
        if len(chunks) == 1:
            logp_T = self._logprobs(hidden, target, temperature)
        else:
            logp_T = torch.cat(
                [
                    cast(Tensor, checkpoint(self._logprobs, hidden_t, target_t, temperature, use_reentrant=False))
                    for hidden_t, target_t in chunks
                ]
            )
        if not entropy:
            return Predicted(logp_T)
        with torch.no_grad():
            return Predicted(logp_T, torch.cat([self._entropy(hidden_t, temperature) for hidden_t in hidden_c]))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (…, V) in fp32 after ``hidden`` (…, H), soft-capped where the model's configuration says so."""
        logits = cast(Tensor, self.lm_head(hidden)).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def _logprobs(self, hidden_t: Tensor, target_t: Tensor, temperature: float) -> Tensor:
        logits = self.logits(hidden_t) / temperature
        return -functional.cross_entropy(logits, target_t, reduction="none")

    def _entropy(self, hidden_t: Tensor, temperature: float) -> Tensor:
        """−Σ p·log p of each position; a word of probability 0 adds nothing."""
        probabilities = (self.logits(hidden_t) / temperature).softmax(dim=-1)
        return cast(Tensor, torch.special.entr(probabilities)).sum(dim=-1)
