"""How probable given replies are, from the sampler, against the long way."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import llama, qwen3
from transformers import PreTrainedModel

from condensegrpo.core.errors import SamplerError
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.samplers.transformers import TransformersSampler, logprobs_of, padded_batches

PAIRS = (((3, 4, 5), (6, 7)), ((0, 0), (1, 2, 3, 4)), ((9,), (10,)))


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersSampler]:
    folder: Path = tmp_path_factory.mktemp("model")
    qwen3().save_pretrained(folder)
    one = TransformersSampler(str(folder))
    yield one
    one.close()


def plain_logprobs(model: PreTrainedModel, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        logp = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0].log_softmax(dim=-1)
    return [float(logp[len(prompt) + place - 1, token]) for place, token in enumerate(output)]


@pytest.mark.parametrize("make", [qwen3, llama])
def test_logprobs_are_those_of_a_plain_pass_in_any_batch(make: type) -> None:
    model = make()
    for (prompt, output), found in zip(PAIRS, logprobs_of(model, PAIRS), strict=True):
        assert found == pytest.approx(plain_logprobs(model, prompt, output), abs=1e-5)


def test_a_sampled_reply_measures_as_its_own_logprobs(sampler: TransformersSampler) -> None:
    async def both() -> tuple[tuple[float, ...], tuple[float, ...]]:
        reply = await sampler.sample((3, 4, 5), SamplingParams(max_tokens=6, seed=1))
        return reply.logprobs, tuple(await sampler.score((3, 4, 5), reply.token_ids))

    sampled, measured = asyncio.run(both())
    assert measured == pytest.approx(sampled, abs=1e-5)


@pytest.mark.parametrize("pair", [((), (1,)), ((1,), ())])
def test_an_empty_prompt_or_reply_cannot_be_measured(
    sampler: TransformersSampler, pair: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    with pytest.raises(SamplerError, match="wanted at least one token of each"):
        asyncio.run(sampler.score(*pair))


@pytest.mark.parametrize(
    ("lengths", "parts"), [([], []), ([3, 4, 9, 2], [(0, 2), (2, 3), (3, 4)]), ([99], [(0, 1)]), ([1] * 9, [(0, 9)])]
)
def test_rows_are_cut_into_batches_that_fit(lengths: list[int], parts: list[tuple[int, int]]) -> None:
    assert [(part.start, part.stop) for part in padded_batches(lengths, 9)] == parts
