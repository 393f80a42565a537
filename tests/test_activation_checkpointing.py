import pytest
import torch
from adapters import EVERYWHERE, moved_qwen3, trained_weights
from packed import hidden_and_bytes
from tiny import forking_rows, llama, surrogate_step
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel

from condensegrpo.algorithms.packing import lay_out
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.layers import checkpoint_layers, checkpointed_layers
from condensegrpo.learner.logprobs import TrainedLogprobs
from condensegrpo.learner.lora import adapter_dropout

pytestmark = pytest.mark.usefixtures("one_thread")


def opt() -> PreTrainedModel:
    """Its layers apply dropout themselves wherever they are in training mode."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return OPTForCausalLM(OPTConfig(vocab_size=32, word_embed_proj_dim=16, dropout=0.5, **sizes)).eval()


BATCH = lay_out([tuple(forking_rows(12)), tuple(forking_rows(5, seed=1))])  # two prefix trees


def gradients(policy: PreTrainedModel, *, checkpointed: int) -> tuple[dict[str, Tensor], int]:
    """The gradients of the micro-batch, and the bytes of the activations kept for backward."""
    checkpoint_layers(policy, checkpointed)
    module = TrainedLogprobs(policy)
    torch.manual_seed(7)
    with adapter_dropout(policy):
        hidden, kept = hidden_and_bytes(module, BATCH)
        surrogate_step(module.head(hidden, BATCH.target, 0.9), BATCH).backward()
    assert not policy.training
    return {name: tensor.grad for name, tensor in trained_weights(policy).items()}, kept


@pytest.mark.parametrize("make", [llama, lambda: moved_qwen3(EVERYWHERE), opt], ids=["llama", "adapters", "opt"])
def test_checkpointed_activations_give_the_same_gradients_to_the_bit(make: type) -> None:
    """Of trees, of adapters with dropout, and of a model whose layers would drop activations in training mode."""
    wanted, all_bytes = gradients(make(), checkpointed=0)
    (half, half_bytes), (found, kept_bytes) = (gradients(make(), checkpointed=count) for count in (1, 2))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert all(torch.equal(half[name], tensor) for name, tensor in wanted.items())
    assert any(bool(tensor.any()) for tensor in wanted.values())
    assert all_bytes >= 5 * kept_bytes
    assert half_bytes > all_bytes / 2


def test_a_layer_more_keeps_its_input_more() -> None:
    policy, deeper = llama(), llama()
    deeper.model.layers.append(llama().model.layers[0])
    deeper.config.num_hidden_layers += 1
    (_, kept), (_, kept_deeper) = (gradients(each, checkpointed=3) for each in (policy, deeper))
    assert kept_deeper - kept == BATCH.token_ids.numel() * 16 * 4  # hidden size 16, fp32


def test_auto_checkpoints_on_a_gpu_only() -> None:
    settings = ("auto", True, False, 1, 0, 9)
    assert [checkpointed_layers(setting, 3, gpu=True) for setting in settings] == [3, 3, 0, 1, 0, 3]
    assert [checkpointed_layers(setting, 3, gpu=False) for setting in settings] == [0, 3, 0, 1, 0, 3]


def test_a_model_without_layers_to_checkpoint_is_refused() -> None:
    policy = llama()
    policy.model.layers = nn.ModuleList([nn.Identity()])
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM: it has no layer .* learner.checkpoint_activations=off"):
        checkpoint_layers(policy)
