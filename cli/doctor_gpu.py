"""Findings of ``doctor``, and its trials: a sampler against the learner, and what a run does on GPUs (``--gpu``).

A trial is a process, which may crash or hang: python -m condensegrpo.cli.doctor_gpu NAME FILE [CONFIG [KEY=VALUE …]]
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.core.errors import CondenseError
from condensegrpo.core.process import temporary_folder
from condensegrpo.core.trajectory import Segment, TrainedTurn
from condensegrpo.core.wording import plural
from condensegrpo.display.console import quiet_libraries

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.storage.run_folder import RunFolder

GIB = 1 << 30
SECONDS = 1200.0  # time limit of a trial, which may compile kernels
INSTALL = "install the CUDA build of torch for your driver (nvidia-smi shows it), or use a machine with a GPU"
NCCL = "NCCL_DEBUG=INFO says where it stops; NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 tries another way"
MODULE = "condensegrpo.cli.doctor_gpu"
AGAIN = f"run it alone to see all it prints: {sys.executable} -m {MODULE}"
UNFIT = "do not train with it: importance ratios would be wrong; condensegrpo train … sampler.name=transformers works"
USUAL = (  # without a configuration: the quickstart's task with 0.15 B parameters and full micro-batches
    *("model.dtype=bfloat16", "model.new.hidden_size=1024", "model.new.layers=12", "model.new.heads=16"),
    *("model.new.ffn_size=3072", "model.new.initializer_range=0.02", "rollout.limits.max_turns=1"),
    *("rollout.limits.max_context_tokens=1792", "rollout.limits.max_output_tokens=256"),
    *("train.problems_per_step=8", "learner.tokens_per_micro_batch=8192", "sampler.name=vllm"),
)


class Level(StrEnum):
    """How serious a finding is."""

    OK = "ok"  # nothing to do
    WARNING = "warning"  # works, but slowly or not for every use
    PROBLEM = "problem"  # a run will fail


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    area: str
    found: str
    cure: str = ""


ok, warning, problem = (partial(Finding, level) for level in Level)


def gpu_findings(config: str | None, overrides: Sequence[str]) -> list[Finding]:
    """The findings of every trial on the devices that torch sees; a model of the Hub is downloaded first."""
    import torch
    from huggingface_hub import snapshot_download

    from condensegrpo.config.load import named_config
    from condensegrpo.learner.model_folder import local_source
    from condensegrpo.storage.hub import model_fault

    if not (count := torch.cuda.device_count()):
        return [problem("GPU", f"torch {torch.__version__} sees none", INSTALL)]
    try:
        path = None if config is None else named_config(config, overrides).model.path
        if path is not None and local_source(path) is None and model_fault(path) is None:  # else the trials say why
            snapshot_download(path, allow_patterns=["*.json", "*.safetensors*", "*.model", "*.txt", "*.jinja"])
    except CondenseError as error:
        return [problem("model", str(error), "correct it, and run doctor --gpu again")]
    arguments = (*([config] if config else []), *overrides)
    return [finding for name in ("sampler", "learner") for finding in run_trial(name, arguments, ranks=count)]


def run_trial(
    name: str, arguments: Sequence[str], *, ranks: int, seconds: float = SECONDS, module: str = MODULE
) -> list[Finding]:
    """The findings of a trial in processes of its own, a rank on every device; that it hangs or dies is one too."""
    several = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    cure = NCCL if several else AGAIN
    with temporary_folder("doctor") as folder:
        file = folder / "findings.json"
        command = [sys.executable, *several, "-m", module, name, str(file), *arguments]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            try:
                printed = process.communicate(timeout=seconds)[0][-1200:].strip()
            except subprocess.TimeoutExpired:
                return [problem(name, f"no answer after {seconds:g} s", cure)]
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        if not file.is_file():
            return [problem(name, f"the check ended with code {process.returncode}: {printed}", cure)]
        findings = json.loads(file.read_text(encoding="utf-8"))
    return [Finding(**{**finding, "level": Level(finding["level"])}) for finding in findings]


def try_sampler(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """Sampler and learner on a tiny model, with the run's type of numbers, kernel, adapters and sampler options.

    The findings are those of the first rank that fails, or of the first one.
    """
    from condensegrpo.config.load import vary
    from condensegrpo.learner import ranks
    from condensegrpo.samplers.vllm.settings import ranks_a_copy
    from condensegrpo.training.parity import parity_config, parity_trial

    ranks.join()
    model, sampler, heads = config.model, config.sampler, max(2, ranks_a_copy(config.sampler.options))
    lora = "null" if model.lora is None else json.dumps(asdict(model.lora))
    tiny = (f"model.new.heads={heads}", f"model.new.hidden_size={32 * heads}", f"model.dtype={model.dtype}")
    kernels = (f"model.attention={model.attention}", f"model.lora={lora}")
    varied = vary(parity_config(sampler.name, sampler.options), (*tiny, *kernels))
    trials = ranks.gather(parity_trial(varied, ranks.from_first(folder)))
    worst = next((trial for trial in trials if not trial.passed), trials[0])
    area = f"sampler {sampler.name}{f', {len(trials)} ranks' if len(trials) > 1 else ''}"
    if not worst.moved_enough:
        text = f"the optimiser step changed the log-probabilities by {worst.moved:.1e} nats only: no conclusion"
        return [problem(area, text, "report this: the change should be far larger")]
    findings = []
    for stage, parities in (("as loaded", worst.before), ("after an optimiser step", worst.after)):
        for parity in parities:
            text = f"{stage}, temperature {parity.temperature:g}: {parity}"
            findings.append(ok(area, text) if parity.holds(worst.bounds) else problem(area, text, UNFIT))
    return findings


def try_learner(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """An optimiser step on the longest rows, a rank on every device; on GPUs its peak memory beside the plan's."""
    import torch

    from condensegrpo.assembly.build import build
    from condensegrpo.assembly.learning_signal import objective
    from condensegrpo.assembly.open_learner import open_learner
    from condensegrpo.config.load import vary
    from condensegrpo.learner import ranks
    from condensegrpo.learner.engine import close_deepspeed, optimizer_step
    from condensegrpo.learner.micro_batches import pack_rows
    from condensegrpo.planning.plan import Plan, architecture, config_on_devices
    from condensegrpo.planning.remedies import advice_for_learner
    from condensegrpo.training.initial_policy import base_policy

    ranks.join()
    size, began, gpu = ranks.world_size(), time.monotonic(), torch.cuda.is_available()
    source = base_policy(config, build(config).task, ranks.from_first(folder))
    sharing = 1 if size % config.learner.sequence_parallel else config.learner.sequence_parallel
    alone = ("sampler={name: scripted}", "algorithm.kl.coefficient=0", f"learner.sequence_parallel={sharing}")
    config = config_on_devices(vary(config, alone), ranks=size, memory=ranks.least_device_memory())
    limits, most = config.rollout.limits, config.learner.tokens_per_micro_batch
    logprobs = (-1.0,) * limits.max_output_tokens
    turn = TrainedTurn(turn=0, start=limits.max_context_tokens, logprobs=logprobs, advantage=1.0, weight=1e-3)
    row = Segment(token_ids=(1,) * limits.turn_tokens, turns=(turn,), trajectory="row", first_turn=0)
    trajectories = config.train.problems_per_step // size * config.train.samples_per_problem
    rows = [row] * min(trajectories, 2 * max(1, most // limits.turn_tokens))  # two micro-batches
    try:
        learner = open_learner(config, source, config.learner.optimiser, lora=config.model.lora, total_steps=1)
        batches = pack_rows(rows, max_tokens=most, share=False, ranks_a_row=learner.module.ranks_a_row)
        optimizer_step(learner, batches, objective(config.algorithm))
    except torch.OutOfMemoryError as error:
        cure = advice_for_learner(config, ranks=size, device="gpu" if gpu else "cpu")
        return [problem("learner", f"a step takes more memory than the device has: {error}", cure)]
    text = f"a step on {plural(size, 'rank')} in {time.monotonic() - began:.0f} s with loading"
    if gpu:
        model = architecture(config.model.model_copy(update={"new": None, "path": source}))
        config = vary(config, (f"learner.compile_layers={learner.module.compiled}",))  # auto is planned as not compiled
        planned = Plan(config, model, ranks=size, device="gpu").total("learning")
        text += f", peak {torch.cuda.max_memory_allocated() / GIB:.2f} GiB, planned {planned / GIB:.2f} GiB"
    close_deepspeed(learner)
    return [ok("learner", text)]


def tried_here(trial: str, name: str, overrides: Sequence[str]) -> list[Finding]:
    """The findings of a trial in this process; an error is one too."""
    from condensegrpo.config.load import named_config
    from condensegrpo.storage.run_folder import RunFolder

    quiet_libraries()
    try:
        config = named_config(name, overrides)
        with temporary_folder("doctor") as temporary:
            folder = RunFolder.create(temporary / "run")
            return try_learner(config, folder) if trial == "learner" else try_sampler(config, folder)
    except CondenseError as error:
        return [problem(trial, str(error), "correct the configuration, the overrides or the files that it names")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a trial and write its findings; on several ranks the first one writes."""
    trial, file, *config = sys.argv[1:] if arguments is None else arguments
    name, *overrides = config or ("quickstart", *USUAL)
    findings = tried_here(trial, name, overrides)
    if os.environ.get("RANK", "0") == "0":
        Path(file).write_text(json.dumps([asdict(finding) for finding in findings]), encoding="utf-8")
        os._exit(0)  # torch and DeepSpeed take seconds to leave


if __name__ == "__main__":
    main()
