"""Packed rows and their log-probabilities, for tests: `from packed import collate, trained_logprobs`."""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from condensegrpo.algorithms.packing import PackedBatch, lay_out
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner.logprobs import TrainedLogprobs


def collate(segments: Sequence[Segment]) -> PackedBatch:
    """The rows one after another as one micro-batch, no prefix shared.

    Example: rows [5 6 7*] and [8 9*] (trained where starred) give

        token_ids    5 6 7 8 9
        position_ids 0 1 2 0 1
        source       1 3            6 predicts 7, 8 predicts 9
        target       7 9
        turns        0 1
    """
    return lay_out([(segment,) for segment in segments])


def computed(module: TrainedLogprobs, batch: PackedBatch, temperature: float, **objective: Any) -> Any:
    """The forward pass of a micro-batch on the CPU."""
    return module(module.place(batch), temperature, **objective)


def hidden_and_bytes(module: TrainedLogprobs, batch: PackedBatch) -> tuple[Tensor, int]:
    """The decoder's hidden states of the trained tokens, and the bytes that it keeps for backward."""
    weights = {tensor.data_ptr() for tensor in module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    placed = module.place(batch)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = module.hidden(placed)
    return hidden, sum(kept.values())


def trained_logprobs(model: PreTrainedModel, batch: PackedBatch, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities (T,) of a packed batch's trained tokens under a model that no engine holds, with gradient.

    rows  [5 6 7]  [8 9]      trained: 7 and 9      ->   log π(7|5 6), log π(9|8)
    """
    return cast(Tensor, computed(TrainedLogprobs(model), batch, temperature))
