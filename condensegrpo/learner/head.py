"""The LM head on some positions, without a [tokens × vocabulary] tensor.

    hidden states (T, H) ─▶ LM head, chunk by chunk ─▶ log π (T,)
                                                   └─▶ Σ w·l where an objective is given, in one pass if it allows

Legend: T trained tokens, _t those of a chunk, H hidden size, V vocabulary.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from condensegrpo.algorithms.objective import MicroBatchLoss, SummedLoss
from condensegrpo.learner import fused_head

CHUNK_LOGITS = 2**25  # logits that exist at a time: 128 MB in fp32


class ChunkedHead(nn.Module):
    """The LM head on some positions: hidden states in, log-probabilities of given tokens or a loss of them out.

    Its chunks are recomputed in backward; what goes through ``fused_head`` needs no backward. ZeRO-3 treats it as one
    leaf: the weight is gathered once, however many chunks or tiles a rank has, so that ranks with different numbers of
    trained tokens stay in step.
    """

    def __init__(self, lm_head: nn.Module, *, softcap: float | None, vocabulary: int) -> None:
        super().__init__()
        self.lm_head = lm_head
        self.softcap = softcap
        self.chunk_tokens = max(1, CHUNK_LOGITS // vocabulary)

    def forward(
        self, hidden: Tensor, target: Tensor, temperature: float, loss: MicroBatchLoss | None = None
    ) -> Tensor | SummedLoss:
        """The log-probabilities of ``target`` (T,) after ``hidden`` (T, H) at ``temperature``, or a loss of them.

        Args:
            loss: the loss of the log-probabilities; None: they are returned.

        Returns:
            The loss if there is a ``loss``, and else the log-probabilities: float32 (T,), nats, with gradient.
        """
        if loss is None:
            return self._chunked(hidden, target, temperature)
        if loss.divisible and self._only_multiplies():
            weight, tile = cast(Tensor, self.lm_head.weight), fused_head.tile_tokens(hidden.device)
            return fused_head.summed(hidden, weight, target, temperature=temperature, loss=loss, tile=tile)
        return loss(self._chunked(hidden, target, temperature))

    def _only_multiplies(self) -> bool:
        """Whether logits are hidden states times a weight and nothing else: no bias, no adapter, no softcap."""
        return type(self.lm_head) is nn.Linear and self.lm_head.bias is None and self.softcap is None

    def _chunked(self, hidden: Tensor, target: Tensor, temperature: float) -> Tensor:
        if not torch.is_grad_enabled() and self._only_multiplies():  # the bits of the one pass: ratios of exactly 1
            weight, tile = cast(Tensor, self.lm_head.weight), fused_head.tile_tokens(hidden.device)
            return fused_head.logprobs(hidden, weight, target, temperature=temperature, tile=tile)
        hidden_c, target_c = torch.split(hidden, self.chunk_tokens), torch.split(target, self.chunk_tokens)
        if len(hidden_c) == 1:
            return self._logprobs(hidden, target, temperature)
        return torch.cat(
            [
                cast(Tensor, checkpoint(self._logprobs, hidden_t, target_t, temperature, use_reentrant=False))
                for hidden_t, target_t in zip(hidden_c, target_c, strict=True)
            ]
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (…, V) in fp32 after ``hidden`` (…, H), soft-capped where the model's configuration says so."""
        logits = cast(Tensor, self.lm_head(hidden)).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def _logprobs(self, hidden_t: Tensor, target_t: Tensor, temperature: float) -> Tensor:
        logits = self.logits(hidden_t) / temperature
        return -functional.cross_entropy(logits, target_t, reduction="none")
