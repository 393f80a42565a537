"""One copy of a model in vLLM, as it runs on a GPU, for all ranks: ``[torchrun …] ranks_vllm.py FOLDER``.

Each rank writes ``FOLDER/facts_<rank>.json``: the largest difference of log-probabilities of its replies to a plain
forward pass, before an update and after it; how vLLM ran; in how many threads; whether its close leaves the decoder.
"""

import asyncio
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm_as_on_a_gpu import as_on_a_gpu

from condensegrpo.core.process import postpone_collections, resume_collections
from condensegrpo.core.trajectory import Generation, SamplingParams
from condensegrpo.learner import ranks
from condensegrpo.samplers.vllm.engine import PLAN
from condensegrpo.samplers.vllm.sampler import VllmSampler
from condensegrpo.samplers.vllm.settings import EngineSettings

PROMPTS = {0: ([5, 6, 7], [0, 0, 9, 9], [19]), 1: ([2, 11, 12],)}  # of each rank, sampled at the same time


class Watch:
    """The threads that use vLLM's engine, how it runs, and a weak reference to its decoder."""

    def __init__(self) -> None:
        from vllm import LLMEngine

        self.threads: set[int] = set()
        for name in ("__init__", "step", "collective_rpc"):
            setattr(LLMEngine, name, self._watched(getattr(LLMEngine, name)))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def watched(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self.threads.add(threading.get_ident())
            result = call(engine, *args, **kwargs)
            if call.__name__ == "__init__":
                config = engine.vllm_config
                self.runs = [
                    config.use_v2_model_runner,
                    config.scheduler_config.async_scheduling,
                    config.compilation_config.mode > 0,
                ]
                self.decoder = engine.apply_model(lambda model: weakref.ref(model.model))[0]
            return result

        return watched


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
    postpone_collections()  # vLLM is imported
    as_on_a_gpu()
    watch = Watch()
    resume_collections()
    sharing = int(os.environ.get("WORLD_SIZE", "1"))
    engine = EngineSettings(
        kv_cache_gib=0.01,
        max_num_seqs=4,
        max_num_batched_tokens=96,
        enforce_eager=False,
        tensor_parallel_size=sharing,
    )
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
    sampler.update(policy.named_parameters(), 1)
    if ranks.rank() == sharing - 1:  # the others have no request: their share of the model is needed all the same
        gaps += [gap(policy, mine[0], asyncio.run(sampled(sampler, mine))[0])]
    distributed.barrier()
    sampler.close()
    facts = {
        "gaps": gaps,
        "described": sampler.describe(),
        "v2, asynchronous, compiled": watch.runs,
        "threads": len(watch.threads),
        "decoder remains": watch.decoder() is not None,
        "takes the plan of an earlier start": os.environ[PLAN] == "1",
    }
    (folder / f"facts_{ranks.rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    os._exit(0)
