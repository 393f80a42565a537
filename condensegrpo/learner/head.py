"""The LM head on some positions, without a [tokens × vocabulary] tensor: log-probabilities, or a loss with gradients.

    hidden states (T, H) ─▶ LM head, chunk by chunk ─▶ log π (T,)
                                                   └─▶ Σ w·l where an objective is given, in one pass if it allows

Autograd through the head forgets the logits of a chunk and computes them again: four products of T·V·H multiplications.
Where the loss of a token depends on that token alone, its derivative is known as soon as its logits are; the gradients
are taken while these are still in the cache: three products, or two where the head's weight is frozen.

    hidden (t, H) ─▶ logits (t, V) ─▶ log π (t,) ─▶ Σ w·l, d/d log π (t,) ─▶ d/d logits ─┬─▶ d/d hidden (t, H)
                                                                                         └─▶ d/d weight (V, H) += …

Legend: T trained tokens, _t those of a chunk or tile, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from condensegrpo.algorithms.objective import MicroBatchLoss, SummedLoss

# Tokens of a tile. More of them read the weight and its gradient less often, and take more memory. Forward and backward
# on a CPU (one thread, fp32, H 256) with 16, 32, 64, 128 and 256: 1.94, 0.94, 0.77, 0.62 and 0.60 s for 1024 tokens at
# V 32,000; 3.57, 2.32, 1.82, 1.63 and 1.63 s for 512 at V 152,000.
CPU_TILE = 128
# On a GPU a product of few tokens waits for memory: the gradient of the weight, fp32, is read and written for each tile
# (8·V·H bytes for 6·t·V·H operations). 1024 tokens are 0.6 GB of logits at V 152,000. Calculated, not measured.
GPU_TILE = 1024


def tile_tokens(device: torch.device) -> int:
    """How many trained tokens to take at a time."""
    return CPU_TILE if device.type == "cpu" else GPU_TILE


def summed(
    hidden: Tensor, weight: Tensor, target: Tensor, *, temperature: float, loss: MicroBatchLoss, tile: int
) -> SummedLoss:
    """Σ w·l of a micro-batch whose logits are ``hidden · weightᵀ``, with gradients for both.

        z = hidden·weightᵀ / temperature,  p = softmax(z),  g = d(Σ w·l) / d log p[target]
        d hidden = g·(1[target] − p)·weight / temperature,  d weight = Σ_t g·(1[target] − p)ᵀ·hidden / temperature

    Until backward it holds d hidden (T, H) and, unless the weight is frozen, d weight (V, H), which backward would
    compute anyway. d weight is summed in fp32 whatever the precision of the weight, so that bfloat16 tiles are not
    rounded in the sum; in bfloat16 that takes twice the weight's memory until the sum is complete.

    Args:
        hidden: (T, H); T may be 0.
        weight: (V, H), of the same precision.
        target: (T,) int64, the tokens whose log-probabilities the loss is of.
        temperature: that they were sampled at.
        loss: of a ``PerToken`` objective.
        tile: how many tokens to take at a time.

    Returns:
        The loss, whose backward may run once, and the statistics of all tokens.
    """
    value, d_hidden, d_weight = _loss_and_gradients(hidden, weight, target, temperature, loss, tile)
    loss_with_gradients = _KnownGradients.apply(  # type: ignore[no-untyped-call]  # torch's
        value.loss, hidden, weight, d_hidden, d_weight
    )
    return value._replace(loss=loss_with_gradients)


@torch.no_grad()
def logprobs(hidden: Tensor, weight: Tensor, target: Tensor, *, temperature: float, tile: int) -> Tensor:
    """log π (T,) of ``target`` in fp32, without gradient: bit for bit what ``summed`` passes to the loss."""
    return torch.cat([part.logp_t for part in _tiles(hidden, weight, target, temperature, tile)])


class Tile(NamedTuple):
    """Some trained tokens at the head. With p the softmax of their logits and n = Σ exp(logits − largest):"""

    tokens: slice  # of all trained tokens
    logp_t: Tensor  # float32, nats, of the targets
    total_t: Tensor  # n
    spread: Tensor  # n·(p − 1[target]), (t, V), float32; every tile uses the same memory


def _tiles(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, tile: int) -> Iterator[Tile]:
    """The tokens ``tile`` at a time; an empty tile if there are none.

    Dividing (t, V) numbers by n, or multiplying them by a slope, would be another pass over them: the callers do so
    where they multiply them with something smaller.
    """
    total_tokens = len(hidden)
    memory = hidden.new_empty(min(tile, total_tokens), len(weight))
    for start in range(0, max(total_tokens, 1), tile):
        tokens = slice(start, min(start + tile, total_tokens))
        target_t1 = target[tokens, None]
        logits = torch.mm(hidden[tokens], weight.t(), out=memory[: len(target_t1)]).float()
        if temperature != 1:
            logits.div_(temperature)
        largest = logits.amax(dim=-1, keepdim=True)
        chosen = logits.gather(1, target_t1) - largest
        total = logits.sub_(largest).exp_().sum(dim=-1, keepdim=True)
        spread = logits.scatter_add_(1, target_t1, -total)
        yield Tile(tokens=tokens, logp_t=(chosen - total.log())[:, 0], total_t=total[:, 0], spread=spread)


@torch.no_grad()
def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, loss: MicroBatchLoss, tile: int
) -> tuple[SummedLoss, Tensor, Tensor | None]:
    """The loss and its gradients with respect to ``hidden`` and, unless it is frozen, ``weight``."""
    d_hidden = torch.empty_like(hidden)
    d_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
    parts = []
    for tokens, logp_t, total_t, spread in _tiles(hidden, weight, target, temperature, tile):
        part, slope_t = _slope(logp_t, loss.part(tokens))  # of no tokens, it names the statistics
        parts.append(part)
        factor_t = (-slope_t / (total_t * temperature))[:, None]  # d logits = factor · spread
        product = spread.to(weight.dtype)
        torch.mm(product, weight, out=d_hidden[tokens]).mul_(factor_t)
        if d_weight is not None:
            scaled = (factor_t * hidden[tokens]).to(weight.dtype)
            if d_weight.dtype == product.dtype:
                d_weight.addmm_(product.t(), scaled)
            else:
                d_weight.add_(product.t() @ scaled)
    total = torch.stack([part.loss for part in parts]).sum()
    statistics = {name: torch.cat([part.statistics[name] for part in parts]) for name in parts[0].statistics}
    return SummedLoss(total, statistics), d_hidden, None if d_weight is None else d_weight.to(weight.dtype)


def _slope(logp_t: Tensor, loss: MicroBatchLoss) -> tuple[SummedLoss, Tensor]:
    """The loss of some log-probabilities, and the derivative of its loss with respect to each."""
    with torch.enable_grad():
        leaf_t = logp_t.requires_grad_()
        value = loss(leaf_t)
        (slope_t,) = torch.autograd.grad(value.loss, leaf_t)
    return value._replace(loss=value.loss.detach()), slope_t


class _KnownGradients(torch.autograd.Function):
    """A number whose gradients are known with it."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  its attributes are those that forward saves
        value: Tensor,
        hidden: Tensor,
        weight: Tensor,
        d_hidden: Tensor,
        d_weight: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(d_hidden, d_weight)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  as above
        d_hidden, d_weight = ctx.saved_tensors
        # In place: the weight's gradient is the largest tensor here. A second backward is refused by autograd.
        return None, d_hidden.mul_(outer), d_weight if d_weight is None else d_weight.mul_(outer), None, None


CHUNK_LOGITS = 2**25  # logits that exist at a time: 128 MB in fp32


class ChunkedHead(nn.Module):
    """The LM head on some positions: hidden states in, log-probabilities of given tokens or a loss of them out.

    Its chunks are recomputed in backward; what ``summed`` computes needs no backward. ZeRO-3 treats it as one
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
        if loss.tokenwise and self._only_multiplies():
            weight, tile = cast(Tensor, self.lm_head.weight), tile_tokens(hidden.device)
            return summed(hidden, weight, target, temperature=temperature, loss=loss, tile=tile)
        return loss(self._chunked(hidden, target, temperature))

    def _only_multiplies(self) -> bool:
        """Whether logits are hidden states times a weight and nothing else: no bias, no adapter, no softcap."""
        return type(self.lm_head) is nn.Linear and self.lm_head.bias is None and self.softcap is None

    def _chunked(self, hidden: Tensor, target: Tensor, temperature: float) -> Tensor:
        if not torch.is_grad_enabled() and self._only_multiplies():  # the bits of the one pass: ratios of exactly 1
            weight, tile = cast(Tensor, self.lm_head.weight), tile_tokens(hidden.device)
            return logprobs(hidden, weight, target, temperature=temperature, tile=tile)
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
