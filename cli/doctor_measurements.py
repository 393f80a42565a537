"""The trials of ``doctor --gpu`` that measure: memory and seconds of the learner, and the speed of the sampler.

Their seconds become keys of a cluster file (``doctor --cluster``).
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from condensegrpo.cli.doctor_machine import GIB, Finding, ok, problem, warning
from condensegrpo.core.wording import counted

if TYPE_CHECKING:
    import torch

    from condensegrpo.config.schema import RunConfig
    from condensegrpo.learner.attention_kernels import Heads
    from condensegrpo.planning.formulas import Decoder
    from condensegrpo.planning.zero import Device
    from condensegrpo.storage.run_folder import RunFolder

OFF_BY = 0.1  # of the measured peak: how far the prediction may be from it
MOST_REPLIES, LEAST_CONTEXT, LEAST_OUTPUT = 64, 32, 16  # of the replies whose seconds are measured, in tokens


def attends(config: "RunConfig") -> "tuple[Heads, torch.dtype, torch.device]":
    """What the learner's attention computes: the heads and numbers of the run's model, and where."""
    import torch

    from condensegrpo.learner.attention_kernels import Heads
    from condensegrpo.learner.devices import DTYPES
    from condensegrpo.planning.architecture import architecture

    sizes, gpu = architecture(config.model).decoder, torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    return Heads(sizes.heads, sizes.kv_heads, sizes.head_size), DTYPES[config.model.dtype], device


def try_learner(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """Two optimiser steps on the longest rows, a rank on every device, and their peak memory against the plan."""
    import torch

    from condensegrpo.assembly.build import build
    from condensegrpo.config.load import vary
    from condensegrpo.learner import ranks
    from condensegrpo.learner.attention_kernels import kernels_on
    from condensegrpo.planning.architecture import architecture
    from condensegrpo.planning.measured import measure_learning
    from condensegrpo.planning.plan import config_on_devices, plan
    from condensegrpo.planning.remedies import advice_for_learner
    from condensegrpo.simulation.calibration import learner_keys
    from condensegrpo.simulation.simulate import passes
    from condensegrpo.training.initial_policy import base_policy

    ranks.join()
    size, sharing = ranks.world_size(), config.learner.sequence_parallel
    # the sampler's memory is not the learner's
    alone = vary(config, ("sampler={name: scripted}", *(["learner.sequence_parallel=1"] if size % sharing else [])))
    kernels = kernels_on(config.model.attention, *attends(config))
    if config.model.attention == "auto" and kernels.flex is None and kernels.varlen is None:
        alone = vary(alone, ("model.attention=sdpa",))  # auto is planned as flex on a GPU, where flex may not compile
    source = base_policy(config, build(config).task, ranks.from_first(folder))
    device: Device = "gpu" if torch.cuda.is_available() else "cpu"
    alone = config_on_devices(alone, ranks=size, memory=ranks.least_device_memory())
    model = architecture(config.model.model_copy(update={"new": None, "path": source}))
    began = time.monotonic()
    try:
        learned = measure_learning(alone, source)
    except torch.OutOfMemoryError as error:
        cure = advice_for_learner(alone, ranks=size, device=device)
        return [problem("learner", f"a step takes more memory than the device has: {error}", cure)]
    alone = vary(alone, (f"learner.compile_layers={learned.compiled}",))  # auto is planned as not compiled
    phases = plan(alone, model, ranks=size, device=device).phases
    planned = next(phase.bytes for phase in phases if phase.name == "learning")
    measured, limits = learned.peaks["learning"], config.rollout.limits
    frozen = config.model.lora is not None
    keys = learner_keys(
        model.decoder,
        _preset(),
        ranks=size,
        rows=learned.rows * size // alone.learner.sequence_parallel,
        context=limits.max_context_tokens,
        outputs=limits.max_output_tokens,
        seconds=learned.seconds or (0.0, 0.0),
        passes=passes(alone.algorithm, frozen=frozen),
        frozen=frozen,
    )
    text = (
        f"steps on {counted(size, 'rank')} in {time.monotonic() - began:.0f} s with loading, peak "
        f"{measured / GIB:.2f} GiB, planned {planned / GIB:.2f} GiB ({planned / measured - 1:+.0%})"
        f"{' with compiled layers' if learned.compiled else ''}"
    )
    if device == "gpu":
        text += f", {learned.reserved / GIB:.2f} GiB reserved"
    text += f"; {_shown(keys) if learned.seconds else 'times not measured: twice the rows do not fit'}"
    if abs(planned / measured - 1) > OFF_BY:
        cure = "leave that much room: the plan is off here; please report it"
        return [replace(warning("learner", text, cure), cluster=keys)]
    return [ok("learner", text, keys)]


def try_speed(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """How long the run's sampler takes with the run's model: prompts, and decoding steps of one and of many replies."""
    from condensegrpo.assembly.build import build
    from condensegrpo.assembly.runtime import open_sampler
    from condensegrpo.planning.architecture import architecture
    from condensegrpo.samplers.vllm.settings import ranks_a_copy
    from condensegrpo.simulation.calibration import measure_sampler, sampler_keys
    from condensegrpo.training.initial_policy import base_policy

    limits, options = config.rollout.limits, config.sampler.options
    servers = max(options.get("replicas", 1), len(options.get("urls", ())), 2 * ("urls_file" in options))
    if max(servers, ranks_a_copy(options), options.get("server", {}).get("tensor_parallel_size", 1)) > 1:
        return [ok("speed", "not tried: it needs one sampler or server on one GPU")]
    if limits.max_context_tokens < LEAST_CONTEXT or limits.max_output_tokens < LEAST_OUTPUT:
        return [ok("speed", f"not tried: it needs {LEAST_CONTEXT} tokens of context and {LEAST_OUTPUT} of output")]
    source = base_policy(config, build(config).task, folder)
    decoder = architecture(config.model.model_copy(update={"new": None, "path": source})).decoder
    trajectories = config.train.problems_per_step * config.train.samples_per_problem
    replies = min(MOST_REPLIES, max(2, trajectories), _room(config, decoder))
    if replies < 2:
        return [ok("speed", "not tried: the sampler has no room for two replies at the same time")]
    sampler = open_sampler(config, source)
    try:
        single, short, long = measure_sampler(
            sampler,
            decoder.vocabulary,
            replies=replies,
            context=limits.max_context_tokens,
            outputs=limits.max_output_tokens,
        )
    finally:
        sampler.close()
    keys = sampler_keys(decoder, _preset(), single=single, short=short, long=long)
    text = (
        f"{config.sampler.name}: a decoding step takes {single.step * 1e3:.2f} ms for 1 reply, {short.step * 1e3:.2f} "
        f"for {replies}, {long.step * 1e3:.2f} after prompts of {long.prompt} tokens, of which it reads "
        f"{long.replies * long.prompt / long.first:,.0f} tokens/s; {_shown(keys)}"
    )
    return [ok("speed", text, keys)]


def _room(config: "RunConfig", decoder: "Decoder") -> int:
    """Full prompts and replies that the sampler has at the same time, by its slots and its room for keys and values."""
    import torch

    from condensegrpo.learner.devices import DTYPES
    from condensegrpo.samplers.vllm.settings import EngineSettings, ServerSettings
    from condensegrpo.simulation.hardware import RESERVED, kv_bytes, weight_bytes

    options, element = config.sampler.options, DTYPES[config.model.dtype].itemsize / 2
    engine, server = EngineSettings(**options.get("engine", {})), ServerSettings(**options.get("server", {}))
    slots = int(options.get("max_batch") or engine.max_num_seqs or MOST_REPLIES)
    if config.sampler.name not in ("vllm", "vllm_server") or not torch.cuda.is_available():
        return slots
    settings = engine if config.sampler.name == "vllm" else server
    left = settings.gpu_memory_utilization * torch.cuda.mem_get_info()[1] - RESERVED - element * weight_bytes(decoder)
    cache = settings.kv_cache_gib * GIB if settings.kv_cache_gib else left
    return min(slots, int(cache / (element * kv_bytes(decoder) * config.rollout.limits.turn_tokens)))


def _preset() -> str | None:
    import torch

    from condensegrpo.simulation.calibration import preset_of

    if not torch.cuda.is_available():
        return None
    return preset_of(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1])


def _shown(keys: Mapping[str, float | str]) -> str:
    if not keys:
        return "not measured: the times are noise, or faster than the data sheet"
    return ", ".join(f"{key}={value if isinstance(value, str) else f'{value:.3g}'}" for key, value in keys.items())
