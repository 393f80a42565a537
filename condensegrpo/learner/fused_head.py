"""The LM head, a loss and their gradients in one pass over the trained tokens.

    hidden (t, H) ─▶ logits (t, V) ─▶ log π (t,) ─▶ Σ w·l, d/d log π (t,) ─▶ d/d logits ─┬─▶ d/d hidden (t, H)
                                                                                         └─▶ d/d weight (V, H) += …

Autograd through the head forgets the logits of a chunk and computes them again: four products of T·V·H multiplications.
Where the loss of a token depends on that token alone, its derivative is known as soon as its logits are; the gradients
are taken while these are still in the cache: three products, or two where the head's weight is frozen.

Legend: T trained tokens, _t those of a tile, H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from condensegrpo.objective import Share, Summed

# Tokens of a tile. More of them read the weight and its gradient less often, and take more memory. Forward and backward
# on a CPU (one thread, fp32, H 256) with 16, 32, 64, 128 and 256: 1.94, 0.94, 0.77, 0.62 and 0.60 s for 1024 tokens at
# V 32,000; 3.57, 2.32, 1.82, 1.63 and 1.63 s for 512 at V 152,000.
CPU_TILE = 128
# On a GPU a product of few tokens waits for memory: the gradient of the weight, fp32, is read and written for each tile
# (8·V·H bytes for 6·t·V·H operations). 1024 tokens are 0.6 GB of logits at V 152,000. Reckoned, not measured.
GPU_TILE = 1024


def tile_tokens(device: torch.device) -> int:
    """How many trained tokens to take at a time."""
    return CPU_TILE if device.type == "cpu" else GPU_TILE


def summed(hidden: Tensor, weight: Tensor, target: Tensor, *, temperature: float, share: Share, tile: int) -> Summed:
    """Σ w·l of a micro-batch whose logits are ``hidden · weightᵀ``, with gradients for both.

        z = hidden·weightᵀ / temperature,  p = softmax(z),  g = d(Σ w·l) / d log p[target]
        d hidden = g·(1[target] − p)·weight / temperature,  d weight = Σ_t g·(1[target] − p)ᵀ·hidden / temperature

    What it holds from here until backward is d hidden (T, H) and, unless the weight is frozen, d weight (V, H): the
    gradient that backward gives away anyhow, a little earlier. d weight is added up in fp32, whatever the precision of
    the weight, so that tiles of bfloat16 lose nothing to each other; that is twice its size while it lasts.

    Args:
        hidden: (T, H); T may be 0.
        weight: (V, H), of the same precision.
        target: (T,) int64, the tokens whose log-probabilities the share is of.
        temperature: that they were sampled at.
        share: of a ``Tokenwise`` objective.
        tile: how many tokens to take at a time.

    Returns:
        The loss, whose backward may run once, and the statistics of all tokens.
    """
    found, d_hidden, d_weight = _computed(hidden, weight, target, temperature, share, tile)
    return found._replace(loss=_known(found.loss, hidden, weight, d_hidden, d_weight))


@torch.no_grad()
def _computed(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, share: Share, tile: int
) -> tuple[Summed, Tensor, Tensor | None]:
    """The loss and its gradients with respect to ``hidden`` and, unless it is frozen, ``weight``."""
    tokens = len(hidden)
    d_hidden = torch.empty_like(hidden)
    d_weight = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
    room = hidden.new_empty(min(tile, tokens), len(weight))  # for every tile's logits in turn
    parts = []
    for start in range(0, max(tokens, 1), tile):  # one without tokens still says which statistics there are
        stop = min(start + tile, tokens)
        hidden_t, target_t = hidden[start:stop], target[start:stop]
        logits = torch.mm(hidden_t, weight.t(), out=room[: stop - start]).float()
        logp_t, total_t = _unnormalised(logits.div_(temperature) if temperature != 1 else logits, target_t)
        part, slope_t = _slope(logp_t, share.part(start, stop))
        parts.append(part)
        factor_t = (-slope_t / (total_t * temperature))[:, None]  # d logits = factor · what is in ``logits`` now
        product = logits.to(weight.dtype)
        torch.mm(product, weight, out=d_hidden[start:stop]).mul_(factor_t)
        if d_weight is not None:
            _add_product(d_weight, product.t(), (factor_t * hidden_t).to(weight.dtype))
    return _together(parts), d_hidden, None if d_weight is None else d_weight.to(weight.dtype)


def _unnormalised(logits: Tensor, target_t: Tensor) -> tuple[Tensor, Tensor]:
    """log π of the targets and the sums n (t,) of exp(logits − largest); turns the logits into n·(p − 1[target]).

    Dividing (t, V) numbers by n, or multiplying them by the slope, would be a walk through them each: that is left to
    whoever multiplies them with something smaller.
    """
    place = target_t[:, None]
    largest = logits.amax(dim=-1, keepdim=True)
    chosen = logits.gather(1, place) - largest
    total = logits.sub_(largest).exp_().sum(dim=-1, keepdim=True)
    logits.scatter_add_(1, place, -total)
    return (chosen - total.log())[:, 0], total[:, 0]


def _slope(logp_t: Tensor, share: Share) -> tuple[Summed, Tensor]:
    """What the share makes of log-probabilities, and the derivative of its loss with respect to each."""
    with torch.enable_grad():
        leaf_t = logp_t.requires_grad_()
        found = share(leaf_t)
        (slope_t,) = torch.autograd.grad(found.loss, leaf_t)
    return found._replace(loss=found.loss.detach()), slope_t


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left·right, where the total may be of higher precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _together(parts: list[Summed]) -> Summed:
    return Summed(
        loss=torch.stack([part.loss for part in parts]).sum(),
        statistics={name: torch.cat([part.statistics[name] for part in parts]) for name in parts[0].statistics},
    )


class _Known(torch.autograd.Function):
    """A number whose gradients are known with it."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  torch's own types do not know what it holds
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


def _known(value: Tensor, hidden: Tensor, weight: Tensor, d_hidden: Tensor, d_weight: Tensor | None) -> Tensor:
    return _Known.apply(value, hidden, weight, d_hidden, d_weight)  # type: ignore[no-any-return, no-untyped-call]
