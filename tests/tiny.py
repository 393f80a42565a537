"""Real models of a few thousand parameters and rows to train them on, for the learner's tests: `from tiny import …`."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from token_columns import marked, places_of
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.core.trajectory import Segment

VOCABULARY = 32


def qwen3(seed: int = 0) -> PreTrainedModel:
    """Tied embeddings, norms on queries and keys."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()


def wide_llama() -> PreTrainedModel:
    """Projections of more than the 100,000 numbers up to which ZeRO 3 leaves a whole copy on every rank."""
    return llama(hidden_size=320)


def llama(seed: int = 0, *, hidden_size: int = 16) -> PreTrainedModel:
    """An LM head of its own."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
        initializer_range=1.2 / hidden_size**0.5,
    )
    return LlamaForCausalLM(config).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(token_models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="w1",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


def segment(
    token_ids: Sequence[int],
    trained: Sequence[int],
    *,
    weight: float = 1.0,
    advantage: float = 1.0,
    logprob: float = -1.0,
) -> Segment:
    """A row whose tokens at the places ``trained`` are trained."""
    flags = [place in trained for place in range(len(token_ids))]
    return marked(token_ids, flags, weight=weight, advantage=advantage, logprob=logprob)


def rows(count: int, *, seed: int = 0, weight: float = 0.01) -> list[Segment]:
    """Rows of 3 to 20 tokens, some of which are trained."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        length = draw.randint(3, 20)
        trained = sorted(draw.sample(range(1, length), draw.randint(1, length - 1)))
        ids = [draw.randrange(VOCABULARY) for _ in range(length)]
        row = segment(ids, trained, weight=weight * draw.uniform(0.5, 1.5), advantage=draw.uniform(-1, 1))
        made.append(with_kl_weights(row))
    return made


def forking_rows(count: int, *, seed: int = 0, weight: float = 0.01) -> list[Segment]:
    """Rows of 5 to 12 tokens that begin alike and part at places of all kinds, trained and not."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        ids = [3, 4, 5, 6, *(draw.randrange(7, 9) for _ in range(draw.randint(1, 8)))]
        trained = draw.sample(range(1, len(ids)), draw.randint(1, len(ids) - 1))
        row = segment(ids, trained, weight=weight * draw.uniform(0.5, 1.5), advantage=draw.uniform(-1, 1))
        made.append(with_kl_weights(row))
    return made


def plain_logprobs(model: PreTrainedModel, row: Segment, *, temperature: float = 1.0) -> Tensor:
    """The same numbers the long way: one row alone, all logits, log-softmax, gather."""
    logits = model(input_ids=torch.tensor([row.token_ids]), use_cache=False).logits[0].float() / temperature
    everything = logits.log_softmax(dim=-1)
    return torch.stack([everything[place - 1, row.token_ids[place]] for place in places_of(row)])


def surrogate(logp_T: Tensor, batch: PackedBatch) -> Tensor:
    """A loss with a gradient that depends on every field: −A·exp(logp − sampler's)."""
    return -batch.advantages * (logp_T - batch.logprobs).exp()


def kl_surrogate(logp_T: Tensor, batch: PackedBatch) -> Tensor:
    """A term with weights of its own, small as a KL term: ¼·exp(logp − sampler's)."""
    return 0.25 * (logp_T - batch.logprobs).exp()


def surrogate_step(logp_T: Tensor, batch: PackedBatch) -> Tensor:
    """What a micro-batch adds to the loss of its step: losses and KL terms, each with its own weights."""
    return (batch.weights * surrogate(logp_T, batch) + batch.kl_weights * kl_surrogate(logp_T, batch)).sum()


def with_kl_weights(row: Segment) -> Segment:
    """The row with weights of KL terms that are not in proportion to those of losses."""
    turns = (replace(turn, kl_weight=turn.weight * (turn.start % 3)) for turn in row.turns)
    return replace(row, turns=tuple(turns))
