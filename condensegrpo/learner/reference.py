"""The reference policy of a KL term: the model that GRPO starts from, and what it says of a batch.

With adapters it is the learner's own base, which never changes; otherwise a frozen copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.learner.engine import DeepSpeedEngine, measure_logprobs
from condensegrpo.learner.logprobs import TrainedLogprobs
from condensegrpo.learner.lora import base_only
from condensegrpo.learner.pictures import BatchPictures
from condensegrpo.learner.policy import load_policy
from condensegrpo.learner.sequence_parallel import RankGroup
from condensegrpo.learner.settings import Dtype

# Micro-batches and the temperature that their tokens were sampled at: the same, with the reference's log-probabilities
# of their trained tokens. The divergence is that between the distributions at this temperature.
Reference = Callable[[Sequence[PackedBatch], float], list[PackedBatch]]


def open_reference(
    source: str,
    *,
    dtype: Dtype,
    attention: str,
    device: torch.device | str,
    group: RankGroup | None = None,
    pictures: BatchPictures | None = None,
) -> TrainedLogprobs:
    """The model of a local folder or Hub id, frozen. Every rank holds a whole copy, outside DeepSpeed.

    Args:
        device: where its weights are; ``against_copy`` moves it for as long as it is used.
        group: ``TrainedLogprobs.group`` of the learner, whose micro-batches it computes.
        pictures: likewise.
    """
    module = TrainedLogprobs(load_policy(source, dtype=dtype, attention=attention).requires_grad_(False))
    module.kernel = attention
    module.check()
    module.group, module.pictures = group, pictures
    return module.to(device)


@torch.no_grad()
def against_copy(
    reference: TrainedLogprobs, device: torch.device | str, batches: Sequence[PackedBatch], temperature: float
) -> list[PackedBatch]:
    """The batches with the log-probabilities of a frozen copy, which is on ``device`` meanwhile.

    Collective among the ranks that compute micro-batches together, and not otherwise.
    """
    home = next(reference.parameters()).device
    reference.to(device)
    logps = [reference(reference.place(batch, torch.device(device)), temperature) for batch in batches]
    reference.to(home)
    return _with_reference(batches, logps)


def against_base(engine: DeepSpeedEngine, batches: Sequence[PackedBatch], temperature: float) -> list[PackedBatch]:
    """The batches with the learner's log-probabilities without its adapters; every rank must call it."""
    with base_only(engine.module):
        logps = measure_logprobs(engine, batches, temperature=temperature)
    return _with_reference(batches, logps)


def _with_reference(batches: Sequence[PackedBatch], logps: Sequence[Tensor]) -> list[PackedBatch]:
    """The batches with measured log-probabilities, which are read only when all passes are under way."""
    return [replace(batch, reference=logp_T.cpu()) for batch, logp_T in zip(batches, logps, strict=True)]
