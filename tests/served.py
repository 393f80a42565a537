"""A model that vLLM serves on a CPU, and its exact log-probabilities: `from served import …`."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.trajectory import Generation, SamplingParams

VOCAB = 40
ROOM = 384  # tokens of a prompt and its reply: three blocks of the prefix cache on a CPU
TEMPLATE = (
    "{%- for message in messages -%}w20 {{ message.role }} {{ message.content }} w21 {% endfor -%}"
    "{%- if add_generation_prompt -%}w20 assistant {% endif -%}"
)
LONG = tuple(token % VOCAB for token in range(3, 300))  # more than two blocks


def save_model(path: Path, *, seed: int = 0, layers: int = 2, head_dim: int = 32) -> PreTrainedModel:
    """A Qwen3 with tied embeddings whose folder would change every distribution; the learner's model."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    model.save_pretrained(path)
    bent = {"do_sample": True, "top_k": 1, "top_p": 0.5, "repetition_penalty": 1.3, "eos_token_id": [5, 6]}
    (path / "generation_config.json").write_text(json.dumps(bent))
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()  # "w1w2": so a stop string can span tokens
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(path)
    return model


def change(model: PreTrainedModel, *, seed: int) -> None:
    """A large update of the weights."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.parameters():
        tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))


def together(sampler: Sampler, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Generation]:
    async def all_at_once() -> list[Generation]:
        return await asyncio.gather(*(sampler.sample(prompt, one) for prompt, one in requests))

    return asyncio.run(all_at_once())


def gap(model: PreTrainedModel, prompt: Sequence[int], reply: Generation, temperature: float = 1.0) -> float:
    """The largest difference of a reply's log-probabilities to those of one plain forward pass, in nats."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *reply.token_ids]]), use_cache=False).logits[0]
    plain = torch.log_softmax(logits[len(prompt) - 1 : -1] / (temperature or 1.0), dim=-1)
    wanted = plain[range(len(reply.token_ids)), list(reply.token_ids)]
    return float((wanted - torch.tensor(reply.logprobs)).abs().max())
