"""The trial of ``doctor --gpu`` that measures the memory of the learner."""

import time
from typing import TYPE_CHECKING

from condensegrpo.cli.doctor_machine import GIB, Finding, ok, problem, warning
from condensegrpo.core.wording import counted

if TYPE_CHECKING:
    import torch

    from condensegrpo.config.schema import RunConfig
    from condensegrpo.learner.attention_kernels import Heads
    from condensegrpo.planning.zero import Device
    from condensegrpo.storage.run_folder import RunFolder

OFF_BY = 0.1  # of the measured peak: how far the prediction may be from it


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
    measured = learned.peaks["learning"]
    text = (
        f"steps on {counted(size, 'rank')} in {time.monotonic() - began:.0f} s with loading, peak "
        f"{measured / GIB:.2f} GiB, planned {planned / GIB:.2f} GiB ({planned / measured - 1:+.0%})"
        f"{' with compiled layers' if learned.compiled else ''}"
    )
    if device == "gpu":
        text += f", {learned.reserved / GIB:.2f} GiB reserved"
    if abs(planned / measured - 1) > OFF_BY:
        cure = "leave that much room: the plan is off here; please report it"
        return [warning("learner", text, cure)]
    return [ok("learner", text)]
