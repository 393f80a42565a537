"""The LM head: chunks, and no tensor of tokens × vocabulary anywhere, forward or backward."""

from typing import Any

import torch
from packed import collate, computed
from tiny import segment
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


def test_no_tensor_of_tokens_by_vocabulary_is_made_in_forward_or_backward() -> None:
    module = TrainedLogprobs(wide())
    some = [segment([3, 4, *range(40 * number, 40 * number + 40)], range(2, 42)) for number in range(1, 4)]
    batch = lay_out([tuple(some)])
    module.head.chunk_tokens = 10
    with Largest() as seen:
        computed(module, batch, 1.0).sum().backward()
    assert len(batch.target) == 120
    assert seen.elements == max(10 * WIDE, WIDE * 8, module.config.hidden_size * 122)  # a chunk's logits


def test_the_watch_sees_such_a_tensor_where_there_is_one() -> None:
    module, batch = TrainedLogprobs(wide()), collate([segment([3, 4, 5, 6], [1, 2, 3])])
    with Largest() as seen:
        module.policy(input_ids=batch.token_ids).logits.sum().backward()
    assert seen.elements >= 4 * WIDE
