"""Two ranks that share one copy of a model in vLLM: ``torchrun … two_ranks_vllm.py FOLDER``.

Each writes the largest difference of its replies' log-probabilities to a plain forward pass, before an update and after
it, as ``FOLDER/gaps_<rank>.json``.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, PreTrainedModel

from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.learner import ranks
from condensegrpo.samplers.vllm.sampler import VllmSampler
from condensegrpo.samplers.vllm.settings import EngineSettings

PROMPTS = {0: ([5, 6, 7], [0, 0, 9, 9], [19]), 1: ([2, 11, 12],)}  # of each rank, sampled at the same time


def gap(model: PreTrainedModel, prompt: Sequence[int], reply: Generation) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *reply.token_ids]]), use_cache=False).logits[0]
    plain = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    own = plain[range(len(reply.token_ids)), list(reply.token_ids)]
    return float((own - torch.tensor(reply.logprobs)).abs().max())


async def sampled(sampler: VllmSampler, prompts: Sequence[Sequence[int]]) -> list[Generation]:
    params = [SamplingParams(max_tokens=3, seed=seed) for seed in range(len(prompts))]
    return await asyncio.gather(*map(sampler.sample, prompts, params))


def main(folder: Path) -> None:
    engine = EngineSettings(kv_cache_gib=0.01, tensor_parallel_size=2)
    sampler = VllmSampler(str(folder), max_model_len=64, engine=engine)
    policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy.eval()
    mine = PROMPTS[ranks.rank()]
    gaps = [gap(policy, *pair) for pair in zip(mine, asyncio.run(sampled(sampler, mine)), strict=True)]
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=noise)
    distributed.barrier()
    sampler.update_weights(policy.named_parameters(), 1)
    if ranks.rank() == 1:  # the first rank has no request: its share of the model is needed all the same
        gaps += [gap(policy, mine[0], asyncio.run(sampled(sampler, mine))[0])]
    distributed.barrier()
    sampler.close()
    (folder / f"gaps_{ranks.rank()}.json").write_text(json.dumps(gaps))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    os._exit(0)
