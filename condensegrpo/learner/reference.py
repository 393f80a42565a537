"""The reference policy of a KL term: a frozen copy of the model that GRPO starts from, and what it says of a batch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch

from condensegrpo.learner.logprobs import TrainedLogprobs
from condensegrpo.learner.policy import load_policy
from condensegrpo.packing import PackedBatch


def open_reference(
    source: str, *, dtype: Literal["float32", "bfloat16"], attention: str, device: torch.device | str
) -> TrainedLogprobs:
    """The model of a local folder or Hub id, frozen. Every rank holds a whole copy, outside DeepSpeed."""
    module = TrainedLogprobs(load_policy(source, dtype=dtype, attention=attention).requires_grad_(False))
    module.check()
    return module.to(device)


@torch.no_grad()
def against(
    reference: TrainedLogprobs, batches: Sequence[PackedBatch], *, temperature: float = 1.0
) -> Iterator[PackedBatch]:
    """The micro-batches with the reference's log-probabilities of their trained tokens; one at a time, no ranks wait.

    Args:
        temperature: that the tokens were sampled at; the divergence is that between the distributions at it.
    """
    device = next(reference.parameters()).device
    for batch in batches:
        there = batch.to(device)
        logp_T = reference(there.token_ids, there.position_ids, there.source, there.target, temperature)
        yield replace(batch, reference=logp_T.to(batch.reference.device))
