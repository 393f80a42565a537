"""The sides that the rollout benchmark compares; they report the time of each run, by the clock and in CPU seconds."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rollout_world import World, engine, play, waves
from sides import Run, Side

from condensegrpo.config.options import build_plugin
from condensegrpo.core.protocols.sampler import Sampler

Wave = list[tuple[tuple[int, ...], int]]  # a prompt and the length of its reply, for every trajectory
KV_GIB = 1.0


class Reading(NamedTuple):
    """One run of a side."""

    wall: float  # seconds
    cpu: float  # seconds of all threads
    found: Any  # what the run gives besides


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every side is made of."""

    folder: Path  # of the policy
    world: World
    dtype: str = "float32"
    threads: int = 1
    longest: int = 4096  # tokens of a prompt and its reply
    options: Mapping[str, object] = field(default_factory=dict)  # of the sampler


def timed_side(start: Callable[[Setting], Run], setting: Setting) -> Side:
    """A process that runs one side on request, and returns a ``Reading``."""
    return Side(partial(_timed, start, setting))


def _timed(start: Callable[[Setting], Run], setting: Setting) -> Callable[[object], Reading]:
    torch.set_num_threads(setting.threads)
    run = start(setting)

    def timed(given: object) -> Reading:
        began = time.monotonic(), time.process_time()
        found = run(given)
        return Reading(time.monotonic() - began[0], time.process_time() - began[1], found)

    return timed


def opened_sampler(setting: Setting, name: str) -> Sampler:
    """A sampler of the policy."""
    options: dict[str, object] = {"model_path": str(setting.folder), "dtype": setting.dtype}
    if name == "vllm":
        options |= {
            "max_model_len": setting.longest,
            "engine": {"kv_cache_gib": None if torch.cuda.is_available() else KV_GIB},
        }
    options |= setting.options
    sampler: Sampler = build_plugin("samplers", name, options)
    return sampler


def through_engine(sampler_name: str, setting: Setting) -> Run:
    """The trajectory engine; a run returns its turns, wave by wave, if ``record`` is set."""
    sampler = opened_sampler(setting, sampler_name)
    parts = engine(setting.folder, sampler, setting.world)
    weights = weights_of(setting.folder)

    def run(record: object) -> list[Wave] | None:
        trajectories = play(parts, setting.world)
        sampler.update(weights, 0)  # and with it every cached key and value goes
        return waves(trajectories) if record else None

    return run


def bare(setting: Setting, *, eager: bool | None = None, own_process: bool = False) -> Run:
    """``LLM.generate`` of vLLM, wave after wave: the same prompts, lengths and settings, and nothing around it.

    Args:
        eager: without compilation and CUDA graphs; None: only on a CPU.
        own_process: the engine computes in a process beside that of the requests.
    """
    import os

    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(own_process))
    import vllm

    on_gpu = torch.cuda.is_available()
    llm = vllm.LLM(
        str(setting.folder),
        dtype=setting.dtype,
        max_model_len=setting.longest,
        kv_cache_memory_bytes=None if on_gpu else int(KV_GIB * 2**30),
        gpu_memory_utilization=0.4,
        enforce_eager=not on_gpu if eager is None else eager,
        enable_prefix_caching=True,
        enable_chunked_prefill=None if on_gpu else False,
        max_num_seqs=None if on_gpu else 256,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        seed=0,
    )
    torch.set_num_threads(setting.threads)

    def run(recorded: Sequence[Wave], *, seeded: bool = True, logprobs: int | None = 0) -> None:
        for number, wave in enumerate(recorded):
            params = [
                vllm.SamplingParams(
                    max_tokens=length,
                    seed=number * len(wave) + place if seeded else None,
                    ignore_eos=True,
                    logprobs=logprobs,
                    flat_logprobs=True,
                    detokenize=False,
                )
                for place, (_, length) in enumerate(wave)
            ]
            prompts = [{"prompt_token_ids": list(ids)} for ids, _ in wave]
            llm.generate(prompts, params, use_tqdm=False)
        llm.reset_prefix_cache()

    return run


def syncs(sampler_name: str, setting: Setting) -> Run:
    """New weights for a sampler, on request."""
    sampler = opened_sampler(setting, sampler_name)
    weights = weights_of(setting.folder)

    def run(version: object) -> int:
        sampler.update(weights, int(str(version)))
        return sum(tensor.numel() for _, tensor in weights)

    return run


def weights_of(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """By name, as the learner gives them: a tied weight comes once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return [(name, tensor.detach()) for name, tensor in model.named_parameters()]
