"""The LM head: chunks, entropy, and no tensor of tokens × vocabulary anywhere, forward or backward."""

from typing import Any

import pytest
import torch
from packed import collate, computed
from tiny import VOCABULARY, llama, plain_logprobs, qwen3, rows, segment
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from condensegrpo.algorithms.packing import lay_out
from condensegrpo.learner.logprobs import TrainedLogprobs

WIDE = 4096  # words


class Largest(TorchDispatchMode):
    """Watches every tensor that any operation makes, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def wide() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WIDE, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("entropy", [False, True])
def test_no_tensor_of_tokens_by_vocabulary_is_made_in_forward_or_backward(entropy: bool) -> None:
    module = TrainedLogprobs(wide())
    some = [segment([3, 4, *range(40 * number, 40 * number + 40)], range(2, 42)) for number in range(1, 4)]
    batch = lay_out([tuple(some)])
    module.head.chunk_tokens = 10
    with Largest() as seen:
        computed(module, batch, 1.0, entropy).logp_T.sum().backward()
    assert len(batch.target) == 120
    assert seen.elements == max(10 * WIDE, WIDE * 8, module.config.hidden_size * 122)  # a chunk's logits


def test_the_watch_sees_such_a_tensor_where_there_is_one() -> None:
    module, batch = TrainedLogprobs(wide()), collate([segment([3, 4, 5, 6], [1, 2, 3])])
    with Largest() as seen:
        module.policy(input_ids=batch.token_ids).logits.sum().backward()
    assert seen.elements >= 4 * WIDE


def test_log_probabilities_alone_unless_the_entropy_is_asked_for() -> None:
    module, batch = TrainedLogprobs(qwen3()), collate(rows(3))
    assert computed(module, batch, 1.0).entropy_T is None


@pytest.mark.parametrize("chunk_tokens", [3, 999])
def test_the_entropy_is_that_of_the_distribution_sampled_from(chunk_tokens: int) -> None:
    model, row = llama(), segment([3, 4, 5, 6, 7, 8], [2, 3, 4, 5])
    module, batch = TrainedLogprobs(model), collate([row])
    module.head.chunk_tokens = chunk_tokens
    found = computed(module, batch, 0.7, True)
    logits = model(input_ids=batch.token_ids).logits[0, 1:5] / 0.7
    torch.testing.assert_close(found.entropy_T, torch.distributions.Categorical(logits=logits).entropy())
    torch.testing.assert_close(found.logp_T, plain_logprobs(model, row, temperature=0.7), rtol=1e-5, atol=1e-5)
    assert not found.entropy_T.requires_grad
    assert found.logp_T.requires_grad


def test_the_entropy_of_equal_words_is_the_logarithm_of_their_number_and_of_a_certain_one_zero() -> None:
    model, batch = llama(), collate([segment([3, 4], [1])])
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = computed(TrainedLogprobs(model), batch, 1.0, True).entropy_T
    torch.testing.assert_close(found, torch.tensor([float(VOCABULARY)]).log())
    model.lm_head.bias = torch.nn.Parameter(torch.full((VOCABULARY,), -1e30))
    with torch.no_grad():
        model.lm_head.bias[7] = 0.0
    assert computed(TrainedLogprobs(model), batch, 1.0, True).entropy_T.tolist() == [0.0]  # and not 0·∞
