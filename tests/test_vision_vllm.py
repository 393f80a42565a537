"""A vLLM server with pictures samples what the plain model would; vLLM in a process: ``test_vllm_sampler.py``.

Its build for CPUs comes without torchvision, which transformers' processors of videos need: of the families, vLLM then
serves Idefics3 alone.
"""

import asyncio
import os
from pathlib import Path

import pytest
from needs_vllm import needs_vllm
from vision_models import picture, plain_inputs, vision_model

from condensegrpo.config.options import build_plugin
from condensegrpo.core.trajectory import SamplingParams
from condensegrpo.storage.media import MediaFolder
from condensegrpo.vision.processor import load_picture_processor


@needs_vllm
@pytest.mark.skipif(
    "LONG_TESTS" not in os.environ, reason="test_vision_rollouts.py has a stand-in of the server: LONG_TESTS=1 runs it"
)
def test_a_servers_replies_to_pictures_have_the_log_probabilities_of_the_plain_model(tmp_path: Path) -> None:
    check_replies_to_pictures("vllm_server", {"server": {"kv_cache_gib": 0.25}}, tmp_path)


def check_replies_to_pictures(name: str, options: dict[str, object], tmp_path: Path) -> None:
    """Log-probabilities are those of the plain model, before an update of the weights and after it."""
    import torch

    model, media = vision_model("idefics3", tmp_path, head_size=32), MediaFolder(tmp_path / "media")
    processor = load_picture_processor(str(tmp_path), media)
    assert processor is not None
    first, second = (media.write(picture(*size)).sha256 for size in ((40, 20), (20, 20)))
    prompts = [
        ((4, 5, *processor.picture_ids(first), 6), (first,)),
        ((7, 8, 9), ()),
        ((4, *processor.picture_ids(first), 5, *processor.picture_ids(second), 6), (first, second)),
    ]
    sampler = build_plugin(
        "samplers", name, options, {"model_path": str(tmp_path), "max_model_len": 256, "media": media}
    )

    async def sampled() -> list[tuple[float, ...]]:
        replies = await asyncio.gather(
            *(
                sampler.sample(ids, SamplingParams(max_tokens=4, seed=seed, media=shown))
                for seed, (ids, shown) in enumerate(prompts)
            )
        )
        for (ids, shown), reply in zip(prompts, replies, strict=True):
            with torch.no_grad():
                logits = model(**plain_inputs(processor, (*ids, *reply.token_ids), shown)).logits[0]
            logp = logits[len(ids) - 1 : -1].log_softmax(dim=-1)
            expected = logp[range(len(reply.token_ids)), list(reply.token_ids)].tolist()
            assert reply.logprobs == pytest.approx(expected, abs=1e-4)
        return [reply.logprobs for reply in replies]

    try:
        before = asyncio.run(sampled())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        sampler.update(model.state_dict().items(), 1)
        assert asyncio.run(sampled()) != before  # a server knows the pictures by now
    finally:
        sampler.close()
