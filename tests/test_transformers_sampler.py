"""The transformers sampler: what it returns was sampled from exactly what it says, alone or in company."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import PluginError, SamplerError
from condensegrpo.core.trajectory import FinishReason, Generation, SamplingParams
from condensegrpo.samplers.transformers import TransformersSampler

VOCAB = 40
POSITIONS = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,  # pad == eos, as many models have it
}
MIXED = (  # prompts of mixed lengths; 0 and 2, which serve for padding somewhere, are ordinary tokens here
    [5, 6, 7],
    [0, 0, 9],
    [2, 11, 12, 13, 14, 15, 16, 17, 18],
    [19],
    [20, 21, 22, 23, 24, 2],
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tied Qwen3, an untied Llama, and a Qwen3 whose generation defaults would bend every distribution."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    qwen = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True))
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    qwen.save_pretrained(root / "qwen3")
    llama.save_pretrained(root / "llama")
    qwen.save_pretrained(root / "bent")
    bent = {"do_sample": True, "top_k": 1, "top_p": 0.5, "repetition_penalty": 1.3, "temperature": 0.1, "max_length": 4}
    (root / "bent" / "generation_config.json").write_text(json.dumps({**bent, "eos_token_id": [5, 6]}))
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()  # "w1w2": so a stop string can span tokens
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(root / "qwen3")
    return {name: str(root / name) for name in ("qwen3", "llama", "bent")}


@pytest.fixture(scope="module")
def qwen(folders: dict[str, str]) -> Iterator[TransformersSampler]:
    sampler = TransformersSampler(folders["qwen3"])
    yield sampler
    sampler.close()


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, **changes})


def together(
    sampler: TransformersSampler, requests: Sequence[tuple[Sequence[int], SamplingParams]]
) -> list[Generation]:
    async def all_at_once() -> list[Generation]:
        return await asyncio.gather(*(sampler.sample(prompt, one) for prompt, one in requests))

    return asyncio.run(all_at_once())


def alone(sampler: TransformersSampler, prompt: Sequence[int], one: SamplingParams) -> Generation:
    return asyncio.run(sampler.sample(prompt, one))


def plain_logprobs(folder: str, prompt: Sequence[int], output: Sequence[int], temperature: float) -> Tensor:
    """(A, V): one forward pass over prompt + output, without cache, padding or company."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "llama", "bent"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_at_the_same_temperature(
    folders: dict[str, str], name: str, temperature: float
) -> None:
    sampler = TransformersSampler(folders[name])
    replies = together(sampler, [(prompt, params(temperature=temperature, seed=7)) for prompt in MIXED])
    for prompt, reply in zip(MIXED, replies, strict=True):
        assert len(reply.token_ids) == 12
        plain = plain_logprobs(folders[name], prompt, reply.token_ids, temperature)
        wanted = plain[range(12), list(reply.token_ids)]
        torch.testing.assert_close(torch.tensor(reply.logprobs), wanted, rtol=0, atol=1e-5)


def test_the_models_own_generation_config_does_not_leak_into_the_distribution(folders: dict[str, str]) -> None:
    requests = [(prompt, params(seed=seed)) for seed in range(6) for prompt in MIXED]
    straight = together(TransformersSampler(folders["qwen3"]), requests)
    bent = together(TransformersSampler(folders["bent"]), requests)
    assert [reply.token_ids for reply in bent] == [reply.token_ids for reply in straight]
    assert any({5, 6} & set(reply.token_ids[:-1]) for reply in bent)  # nor do its stop ids


def test_the_seed_alone_names_the_stream(qwen: TransformersSampler) -> None:
    first, again, other, high = together(qwen, [(MIXED[0], params(seed=seed)) for seed in (3, 3, 4, 3 + 2**32)])
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids
    assert first.token_ids != high.token_ids  # all 63 bits of a seed count


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_tokens_come_as_often_as_softmax_says(
    folders: dict[str, str], qwen: TransformersSampler, temperature: float
) -> None:
    draws = 2000
    replies = together(
        qwen, [(MIXED[2], params(max_tokens=1, temperature=temperature, seed=seed)) for seed in range(draws)]
    )
    found = Counter(reply.token_ids[0] for reply in replies)
    expected = draws * plain_logprobs(folders["qwen3"], MIXED[2], [0], temperature)[0].exp()
    common = [token for token in range(VOCAB) if expected[token] >= 5]
    assert len(common) >= 8
    statistic = sum((found[token] - float(expected[token])) ** 2 / float(expected[token]) for token in common)
    assert statistic < len(common) + 5 * math.sqrt(2 * len(common))


def test_greedy_is_transformers_greedy_with_logprobs_at_temperature_1(
    folders: dict[str, str], qwen: TransformersSampler
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.float32).eval()
    for prompt in MIXED:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=None
        )
        wanted = output[0, len(prompt) :].tolist()
        reply = alone(qwen, prompt, params(temperature=0.0, seed=5))
        assert list(reply.token_ids) == wanted
        plain = plain_logprobs(folders["qwen3"], prompt, wanted, 1.0)[range(12), wanted]
        torch.testing.assert_close(torch.tensor(reply.logprobs), plain, rtol=0, atol=1e-5)


def test_a_token_of_probability_zero_is_never_drawn(folders: dict[str, str]) -> None:
    sampler = TransformersSampler(folders["llama"])
    weights = weights_of(folders["llama"])
    weights["lm_head.weight"] = (
        weights["lm_head.weight"] * 1e6
    )  # one token has all the probability, the others exactly 0
    sampler.update(weights.items(), 1)
    sampled = together(sampler, [(prompt, params(seed=seed)) for seed in range(20) for prompt in MIXED])
    greedy = together(sampler, [(prompt, params(temperature=0.0)) for _ in range(20) for prompt in MIXED])
    assert [reply.token_ids for reply in sampled] == [reply.token_ids for reply in greedy]
    assert {logprob for reply in sampled for logprob in reply.logprobs} == {0.0}


# --- stops ------------------------------------------------------------------------------------------------------------


def test_a_stop_id_ends_a_reply_and_is_kept_with_its_logprob(qwen: TransformersSampler) -> None:
    free = alone(qwen, MIXED[0], params(seed=2))
    stop = free.token_ids[4]
    end = free.token_ids.index(stop) + 1
    stopped, still_free = together(qwen, [(MIXED[0], params(seed=2, stop_ids=(stop, 39))), (MIXED[0], params(seed=2))])
    assert (stopped.token_ids, stopped.finish) == (free.token_ids[:end], FinishReason.STOP)
    assert stopped.logprobs == pytest.approx(free.logprobs[:end], abs=1e-5)
    assert (still_free.token_ids, still_free.finish) == (
        free.token_ids,
        FinishReason.LENGTH,
    )  # each row has its own stops


def test_eos_is_trained_when_pad_is_eos(qwen: TransformersSampler) -> None:
    """Pitfall 10: the end is told by counting, never by an id that padding shares."""
    replies = together(qwen, [(MIXED[2], params(max_tokens=40, seed=seed, stop_ids=(2,))) for seed in range(30)])
    stopped = [reply for reply in replies if reply.finish is FinishReason.STOP]
    assert stopped
    for reply in stopped:
        assert (reply.token_ids[-1], reply.token_ids.count(2)) == (2, 1)
        assert reply.logprobs[-1] < 0
    for reply in replies:
        if reply.finish is FinishReason.LENGTH:
            assert (len(reply.token_ids), 2 in reply.token_ids) == (40, False)  # no made-up end


def test_a_stop_string_may_span_tokens_and_its_last_token_is_kept_whole(qwen: TransformersSampler) -> None:
    free = alone(qwen, MIXED[0], params(seed=4))
    place = next(place for place in range(2, 12) if free.token_ids[place] >= 10)
    text = f"w{free.token_ids[place - 1]}w{free.token_ids[place] // 10}"  # ends inside of the token at ``place``
    stopped, other = together(
        qwen, [(MIXED[0], params(seed=4, stop_strings=("never", text))), (MIXED[1], params(seed=4))]
    )
    said = [f"w{token}" for token in free.token_ids]
    end = next(end for end in range(1, 13) if text in "".join(said[:end]))
    assert 1 < end <= place + 1
    assert (stopped.token_ids, stopped.finish) == (free.token_ids[:end], FinishReason.STOP)
    assert (len(other.token_ids), other.finish) == (12, FinishReason.LENGTH)


def test_a_stop_string_of_the_prompt_does_not_stop_the_reply(qwen: TransformersSampler) -> None:
    free = alone(qwen, MIXED[0], params(seed=6, max_tokens=1))
    reply = alone(qwen, MIXED[0], params(seed=6, max_tokens=1, stop_strings=(f"w7w{free.token_ids[0]}",)))
    assert reply.finish is FinishReason.LENGTH


# --- requests that cannot be met --------------------------------------------------------------------------------------


def test_a_request_beyond_the_models_positions_is_refused_with_the_numbers(qwen: TransformersSampler) -> None:
    """Pitfall 21: prompt + max_tokens > max_len."""
    assert len(alone(qwen, [5] * 60, params(max_tokens=4)).token_ids) == 4
    with pytest.raises(SamplerError, match=r"60 tokens and max_tokens=5 make 65, and .* has 64 positions"):
        alone(qwen, [5] * 60, params(max_tokens=5))


@pytest.mark.parametrize(("prompt", "changes"), [([], {}), ([5], {"max_tokens": 0}), ([5], {"temperature": -1.0})])
def test_invalid_requests_are_refused(qwen: TransformersSampler, prompt: list[int], changes: dict[str, Any]) -> None:
    with pytest.raises(SamplerError, match="wanted at least one token"):
        alone(qwen, prompt, params(**changes))


def test_a_failing_batch_reaches_every_waiting_request_and_the_next_one_works(qwen: TransformersSampler) -> None:
    async def with_one_bad_prompt() -> list[Generation | BaseException]:
        requests = (qwen.sample(prompt, params()) for prompt in (MIXED[0], [VOCAB + 7], MIXED[1]))
        return await asyncio.gather(*requests, return_exceptions=True)

    failures = asyncio.run(with_one_bad_prompt())
    assert [type(failure) for failure in failures] == [SamplerError] * 3
    assert "generating a batch of 3 replies: IndexError" in str(failures[0])
    assert len(alone(qwen, MIXED[0], params()).token_ids) == 12


def test_a_request_that_cannot_join_fails_and_the_next_one_works(qwen: TransformersSampler) -> None:
    no_text = params(stop_strings=("\ud800",))  # half of a character has no bytes
    with pytest.raises(SamplerError, match="UnicodeEncodeError"):
        asyncio.run(asyncio.wait_for(qwen.sample(MIXED[0], no_text), 10))
    assert len(alone(qwen, MIXED[0], params()).token_ids) == 12


def test_a_missing_model_and_invalid_options_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match="nothing-here"):
        TransformersSampler(str(tmp_path / "nothing-here"))
    for option, fault in (
        ({"dtype": "int3"}, "dtype is 'int3', wanted"),
        ({"max_batch": 0}, "max_batch is 0, wanted at"),
    ):
        with pytest.raises(PluginError, match=fault):
            build_plugin("samplers", "transformers", {"model_path": str(tmp_path), **option})


# --- weights ----------------------------------------------------------------------------------------------------------


def weights_of(folder: str) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_an_update_changes_logits_and_version(folders: dict[str, str]) -> None:
    """Pitfalls 22 and 24: after an update the very same prompt is answered by the new weights."""
    sampler = TransformersSampler(folders["qwen3"])
    before = alone(sampler, MIXED[0], params(temperature=0.0))
    weights = weights_of(folders["qwen3"])
    torch.manual_seed(1)
    changed = {name: tensor + 0.2 * torch.randn_like(tensor) for name, tensor in weights.items()}
    changed["lm_head.weight"] = changed["model.embed_tokens.weight"]  # tied
    assert sampler.version == 0
    sampler.update(iter(changed.items()), 5)
    after = alone(sampler, MIXED[0], params(temperature=0.0))
    assert sampler.version == 5
    assert after.logprobs != before.logprobs
    model = AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.float32).eval()
    model.load_state_dict(changed)
    with torch.no_grad():
        logits = model(torch.tensor([[*MIXED[0], *after.token_ids]])).logits[0]
    wanted = torch.log_softmax(logits, dim=-1)[range(2, 14), list(after.token_ids)]
    torch.testing.assert_close(torch.tensor(after.logprobs), wanted, rtol=0, atol=1e-5)


def test_tied_weights_may_be_missing(folders: dict[str, str]) -> None:
    sampler = TransformersSampler(folders["qwen3"])
    weights = weights_of(folders["qwen3"])
    del weights["lm_head.weight"]
    sampler.update(weights.items(), 2)
    assert sampler.version == 2


def test_weights_that_do_not_fit_are_named(folders: dict[str, str]) -> None:
    sampler = TransformersSampler(folders["llama"])
    weights = weights_of(folders["llama"])
    with pytest.raises(SamplerError, match=r"'model\.extra\.weight' is no weight of its model"):
        sampler.update([("model.extra.weight", torch.zeros(3))], 1)
    with pytest.raises(
        SamplerError, match=r"'model.norm.weight' has the shape \(33,\), the sampler's model wants \(32,\)"
    ):
        sampler.update({**weights, "model.norm.weight": torch.zeros(33)}.items(), 1)
    del weights["lm_head.weight"]  # not tied here
    with pytest.raises(SamplerError, match=r"1 of \d+ were not given, the first is 'lm_head.weight'"):
        sampler.update(weights.items(), 1)
    assert sampler.version == 0


def test_a_closed_sampler_says_so_and_closes_twice(folders: dict[str, str]) -> None:
    sampler = build_plugin("samplers", "transformers", {"model_path": folders["qwen3"], "max_batch": 4})
    sampler.close()
    sampler.close()
    with pytest.raises(SamplerError, match="shutdown"):
        alone(sampler, MIXED[0], params())
