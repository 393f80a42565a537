"""The plan's layer against the tensors that torch saves for backward, and what the LM head keeps."""

from pathlib import Path

import pytest
import torch
from packed import collate
from token_columns import marked
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from condensegrpo.algorithms.objective import MicroBatchLoss, PerToken, supervised
from condensegrpo.config.schema import ModelSettings
from condensegrpo.learner import head as fused_head
from condensegrpo.learner.head import ChunkedHead
from condensegrpo.planning.plan import architecture, layer_bytes

SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
DTYPES = (torch.float32, torch.bfloat16)


def model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def kept_bytes(model: PreTrainedModel, rows: int, length: int) -> int:
    """What the decoder's forward pass keeps for backward, by its storage, without parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}  # held, so that no two share a storage

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = tensor
        return tensor

    ids = torch.zeros(rows, length, dtype=torch.long)
    places = torch.arange(length).expand(rows, length).contiguous()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.get_decoder()(input_ids=ids, position_ids=places, attention_mask=None, use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


# --- against torch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("mistral", {"head_dim": 8}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"head_dim": 8, "num_key_value_heads": 6}),
    ],
)
def test_activations_are_nearly_what_autograd_keeps(
    kind: str, more: dict[str, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(kind, **{**SIZES, **more}, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    sizes = architecture(ModelSettings(path=str(tmp_path)))
    layers = 2 * 128 * layer_bytes(sizes, dtype.itemsize)
    ends = 128 * 48 * (4 + dtype.itemsize)  # the last norm
    assert layers + ends == pytest.approx(kept_bytes(model(config, dtype), 4, 32), rel=0.04)


def test_sdpa_keeps_no_matrix_of_pairs() -> None:
    config = AutoConfig.for_model("llama", **SIZES, num_hidden_layers=1)
    small, large = (kept_bytes(model(config), 1, length) for length in (32, 64))
    assert large == 2 * small


def test_the_head_keeps_nothing_of_a_chunk_that_it_can_compute_again() -> None:
    """So that the plan's three tensors are those of one chunk, whatever the number of chunks."""
    head = ChunkedHead(torch.nn.Linear(8, 64, bias=False), softcap=None, vocabulary=64)
    head.chunk_tokens = 4
    hidden, target = torch.randn(12, 8, requires_grad=True), torch.zeros(12, dtype=torch.long)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        head(hidden, target, 1.0)
    assert max(kept, default=0) < 4 * 64


@pytest.mark.parametrize("trained", [True, False])
def test_the_one_pass_head_keeps_two_gradients_and_no_logits(trained: bool) -> None:
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(64, 8).requires_grad_(trained)
    batch = collate([marked((1,) * 13, [False, *[True] * 12], logprob=0.0)])
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fused_head.summed(
            hidden, weight, batch.target, temperature=1.0, loss=MicroBatchLoss(PerToken(supervised), batch), tile=4
        )
    assert sorted(size for size in kept if size > 12) == ([12 * 8, 64 * 8] if trained else [12 * 8])
