"""Draws the next token of every row from its logits, with a random number of the row's stream.

Legend: _B rows, _V vocabulary.
"""

import torch
from torch import Tensor


def pick(logits_BV: Tensor, uniform_B1: Tensor, temperature_B1: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of every row, and its log-probability.

    token = min {v : CDF_v > u·CDF_V},  CDF = cumulative sum of softmax(logits/T)

    This inverts the distribution function: one uniform per token, and no token of probability zero is ever drawn. Rows
    do not depend on each other.

    Args:
        logits_BV: the model's, of any floating type.
        uniform_B1: float64, in [0, 1).
        temperature_B1: 0 is greedy.

    Returns:
        Tokens (B, 1), and log_softmax(logits/T)[token] (B, 1) in fp32, nats; at T = 1 for greedy rows. Where logits are
        not numbers the log-probability is not finite.
    """
    greedy_B1 = temperature_B1 == 0
    logp_BV = torch.log_softmax(logits_BV.float() / torch.where(greedy_B1, 1.0, temperature_B1), dim=-1)
    cdf_BV = logp_BV.double().exp_().cumsum(dim=-1)
    total_B1 = cdf_BV[:, -1:]
    below_total_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))  # u·total may round up to the total
    target_B1 = torch.minimum(uniform_B1 * total_B1, below_total_B1)
    drawn_B1 = torch.searchsorted(cdf_BV, target_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)  # NaN: past it
    token_B1 = torch.where(greedy_B1, logp_BV.argmax(dim=-1, keepdim=True), drawn_B1) if greedy_B1.any() else drawn_B1
    return token_B1, logp_BV.gather(1, token_B1)
