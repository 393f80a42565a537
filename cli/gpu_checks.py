"""The checks of ``doctor --gpu``, each a process of its own.

    python -m condensegrpo.cli.gpu_checks NAME FILE [CONFIG [KEY=VALUE …]]

A check may crash, hang or leave memory behind, as drivers do: the command that starts it (``doctor_gpu.py``) goes on to
the next. Each writes its findings to FILE as JSON. With a configuration it tries that run's model, kernel and sampler.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.cli.findings import Finding, ok, problem, warning
from condensegrpo.core.errors import CondenseError
from condensegrpo.core.wording import counted

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.planning.zero import Device
    from condensegrpo.storage.run_folder import RunFolder

GIB = 1 << 30
OFF_BY = 0.1  # of the measured peak: how far the prediction may be from it
SENT = 64 << 20  # bytes that the ranks add up at a time
ROUNDS = 8
USUAL = (  # without a configuration: the quickstart's task with 0.15 B parameters and full micro-batches
    "model.dtype=bfloat16",
    *("model.new.hidden_size=1024", "model.new.layers=12", "model.new.heads=16", "model.new.ffn_size=3072"),
    "model.new.initializer_range=0.02",
    *("rollout.limits.max_turns=1", "rollout.limits.max_context_tokens=1792", "rollout.limits.max_output_tokens=256"),
    "train.problems_per_step=8",
    "learner.tokens_per_micro_batch=8192",
    "sampler.name=vllm",
)


def device(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """The devices, and whether one multiplies in the run's type of numbers."""
    import torch

    from condensegrpo.learner.dtypes import DTYPES

    place = "cuda" if torch.cuda.is_available() else "cpu"
    ones = torch.ones(1024, 1024, dtype=DTYPES[config.model.dtype], device=place)
    product = float((ones @ ones).float().mean())
    if product != 1024:
        return [problem("multiplication", f"1024 × 1024 ones give {product}, not 1024", "the device is faulty")]
    if place == "cuda" and config.model.dtype == "float32":
        cure = "model.dtype=bfloat16 halves the memory and is several times as fast"
        return [warning("multiplication", "the run computes in float32", cure)]
    return [ok("multiplication", f"{config.model.dtype} works on {place}")]


def collective(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """A sum over all ranks as the learner takes it: every rank is a process of its own."""
    import torch
    from torch import distributed

    from condensegrpo.learner import ranks
    from condensegrpo.learner.deepspeed_import import get_accelerator

    ranks.join()
    own = torch.full((SENT // 4,), float(ranks.rank() + 1), device=get_accelerator().current_device_name())
    began = time.monotonic()
    for _ in range(ROUNDS):
        distributed.all_reduce(own)
        own /= ranks.world_size()
    get_accelerator().synchronize()
    seconds = time.monotonic() - began
    size, wanted = ranks.world_size(), (ranks.world_size() + 1) / 2  # the mean of 1, 2, … N, which stays as it is
    ranks.barrier()
    if float(own[0]) != wanted or float(own[-1]) != wanted:
        text = f"the mean of the ranks' numbers is {float(own[0])}, wanted {wanted}"
        return [problem("ranks", text, "NCCL_P2P_DISABLE=1 tries another way between the devices")]
    rate = ROUNDS * SENT / seconds / 1e9
    return [ok("ranks", f"{size} ranks add up {SENT >> 20} MiB over {distributed.get_backend()}: {rate:.1f} GB/s")]


def parity(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """Sampler and learner on a tiny model, with the run's type of numbers, kernel, adapters and sampler options."""
    from condensegrpo.cli.doctor_parity import parity_findings
    from condensegrpo.config.load import vary
    from condensegrpo.training.parity import configuration, trial

    tiny, model = configuration(config.sampler.name, unshared(config.sampler.options)), config.model
    lora = "null" if model.lora is None else json.dumps(asdict(model.lora))
    tiny = vary(tiny, (f"model.dtype={model.dtype}", f"model.attention={model.attention}", f"model.lora={lora}"))
    return parity_findings(f"sampler {config.sampler.name}", trial(tiny, folder))


def unshared(options: Mapping[str, object]) -> dict[str, object]:
    """The options of a sampler for a single rank, which shares its copy of the model with no other."""
    engine = options.get("engine")
    if not isinstance(engine, dict):
        return dict(options)
    return {**options, "engine": {key: value for key, value in engine.items() if key != "tensor_parallel_size"}}


def attention(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """The kernels of the learner's attention against SDPA, with the heads and numbers of the run's model."""
    import torch

    from condensegrpo.learner.attention_kernels import Heads, check_kernel
    from condensegrpo.learner.dtypes import DTYPES
    from condensegrpo.planning.architecture import architecture

    sizes, place = architecture(config.model).decoder, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads, dtype = Heads(sizes.heads, sizes.kv_heads, sizes.head_size), DTYPES[config.model.dtype]
    findings = []
    for check in (check_kernel(kernel, heads, dtype, place) for kernel in ("flex", "flash")):
        area, wanted = f"attention, {check.kernel}", config.model.attention == check.kernel
        if check.fault is None:
            findings.append(ok(area, f"output and gradients differ from SDPA by {check.difference:.1e} of their norm"))
        elif wanted:
            findings.append(problem(area, check.fault, "set model.attention=auto, which takes another kernel"))
        else:
            findings.append(warning(area, check.fault, "not needed: without it another kernel is used"))
    return findings


def transfer(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """Weights from the learner to a server on the second device, over NCCL on GPUs, and what it samples with them."""
    import torch

    from condensegrpo.cli.doctor_parity import parity_findings
    from condensegrpo.config.load import vary
    from condensegrpo.training.parity import configuration, trial

    way = "nccl" if torch.cuda.is_available() else "folder"
    tiny = vary(configuration("vllm_server", {"server": {"weights": way}}), (f"model.dtype={config.model.dtype}",))
    return parity_findings(f"server, weights={way}", trial(tiny, folder))


def learner(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """Two optimiser steps on the longest rows, a rank on every device, and their peak memory against the plan."""
    import torch

    from condensegrpo.assembly.build import build
    from condensegrpo.config.load import vary
    from condensegrpo.learner import ranks
    from condensegrpo.planning.architecture import architecture
    from condensegrpo.planning.measured import measure_learning
    from condensegrpo.planning.plan import plan
    from condensegrpo.training.initial_policy import base_policy

    ranks.join()
    size, sharing = ranks.world_size(), config.learner.sequence_parallel
    # the sampler's memory is not the learner's
    alone = vary(config, ("sampler={name: scripted}", *(["learner.sequence_parallel=1"] if size % sharing else [])))
    source = base_policy(config, build(config).task, ranks.from_first(folder))
    place: Device = "gpu" if torch.cuda.is_available() else "cpu"
    phases = plan(alone, architecture(config.model), ranks=size, device=place).phases
    planned = next(phase.bytes for phase in phases if phase.name == "learning")
    began = time.monotonic()
    try:
        measured = measure_learning(alone, source)["learning"]
    except torch.OutOfMemoryError as error:
        cure = "condensegrpo plan … --device-memory SIZE prints settings that fit"
        return [problem("learner", f"a step takes more memory than the device has: {error}", cure)]
    text = (
        f"two steps on {counted(size, 'rank', 'ranks')} in {time.monotonic() - began:.0f} s with loading, peak "
        f"{measured / GIB:.2f} GiB, planned {planned / GIB:.2f} GiB ({planned / measured - 1:+.0%})"
    )
    if abs(planned / measured - 1) > OFF_BY:
        return [warning("learner", text, "leave that much room: the plan is off here; please report it")]
    return [ok("learner", text)]


Check = Callable[["RunConfig", "RunFolder"], list[Finding]]
CHECKS: Mapping[str, Check] = {
    "device": device,
    "ranks": collective,
    "attention": attention,
    "sampler": parity,
    "transfer": transfer,
    "learner": learner,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a check and write its findings; on several ranks the first one writes."""
    from condensegrpo.cli.quiet import quiet_libraries
    from condensegrpo.config.load import named_config
    from condensegrpo.storage.run_folder import RunFolder

    parser = argparse.ArgumentParser()
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("file", type=Path)
    parser.add_argument("config", nargs="*", help="a configuration and overrides of its keys")
    given = parser.parse_args(arguments)
    quiet_libraries()
    try:
        name, *overrides = given.config or ("quickstart", *USUAL)
        config = named_config(name, overrides)
        with tempfile.TemporaryDirectory(prefix="condensegrpo-") as place:
            findings = CHECKS[given.check](config, RunFolder.create(Path(place) / "run"))
    except CondenseError as error:
        findings = [problem(given.check, str(error), "correct it, and run doctor --gpu again")]
    if os.environ.get("RANK", "0") == "0":
        given.file.write_text(json.dumps([asdict(finding) for finding in findings]), encoding="utf-8")
        os._exit(0)  # torch and DeepSpeed take seconds to leave


if __name__ == "__main__":
    main()
