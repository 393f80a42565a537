"""Losses per trained token, and the weights that add them up. Pure functions of tensors; torch only.

Legend of the suffixes: ``_T`` trained tokens, ``_N`` trajectories, ``_K`` turns.

    loss.py        ``loss``: declares a function of a token's columns as a loss
    policy.py      l, the loss of a token: clipped, gspo, cispo, reinforce
    importance.py  c, what the token's loss is multiplied by where the sampler's distribution is not the learner's
    kl.py          k, the distance to a reference model: k1, k2, k3
    weights.py     w, the weight of the token in the optimiser step
    columns.py     what they share: differences of log-probabilities that are never NaN, and sums over a turn

The loss of an optimiser step is Σ w·c·l + Σ u·β·k over the trained tokens of all its micro-batches on all ranks; u is
w unless KL terms have an aggregation of their own. Every weight is fixed before the first micro-batch from totals over
the whole step, so that no micro-batch divides by anything of its own: the gradient is the same however the rows are
packed, ordered or shared out.
"""

from condensegrpo.algorithms.losses.columns import MAX_DIFFERENCE
from condensegrpo.algorithms.losses.importance import importance
from condensegrpo.algorithms.losses.kl import KL, k1, k2, k3
from condensegrpo.algorithms.losses.loss import LossPlugin, TokenLoss, loss
from condensegrpo.algorithms.losses.policy import cispo, clipped, gspo, reinforce
from condensegrpo.algorithms.losses.weights import (
    WEIGHTS,
    Totals,
    summary_weight,
    token_weights,
    totals,
    with_summary_share,
)

__all__ = [
    "KL",
    "MAX_DIFFERENCE",
    "WEIGHTS",
    "LossPlugin",
    "TokenLoss",
    "Totals",
    "cispo",
    "clipped",
    "gspo",
    "importance",
    "k1",
    "k2",
    "k3",
    "loss",
    "reinforce",
    "summary_weight",
    "token_weights",
    "totals",
    "with_summary_share",
]
