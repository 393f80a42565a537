"""What ``doctor`` tries on the devices: a sampler against the learner (``--sampler``), and what a run does (``--gpu``).

Every trial of ``--gpu`` is a process of its own, because it may crash, hang or leave memory behind, as drivers do:

    python -m condensegrpo.cli.doctor_trials NAME FILE [CONFIG [KEY=VALUE …]]

It writes its findings to FILE as JSON. With a configuration it tries that run's model, kernel and sampler.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.cli.doctor_machine import Finding, Level, ok, problem, warning
from condensegrpo.cli.doctor_measurements import attends, try_learner
from condensegrpo.core.errors import CondenseError
from condensegrpo.display import theme

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.storage.run_folder import RunFolder
    from condensegrpo.training.parity import ParityTrial

SECONDS, COMPILING_SECONDS = 300.0, 1200.0  # time limit of a trial, and of one that compiles kernels
MODEL_FILES = ["*.json", "*.safetensors*", "*.model", "*.txt", "*.jinja"]
TAIL = 1200  # characters shown of what a trial printed before it died
INSTALL = "install the CUDA build of torch for your driver (nvidia-smi shows it), or use a machine with a GPU"
AGAIN = "run it alone to see all it prints: python -m condensegrpo.cli.doctor_trials"
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
CURE = "do not train with it: importance ratios would be wrong; condensegrpo train … sampler.name=transformers works"


def sampler_findings(name: str, config: str | None, overrides: list[str]) -> list[Finding]:
    """Sample, take an optimiser step, send the weights, sample again and compare. Takes half a minute."""
    from condensegrpo.config.load import named_config
    from condensegrpo.display.console import quiet_libraries
    from condensegrpo.storage.run_folder import RunFolder
    from condensegrpo.training.parity import parity_config, parity_trial

    area = f"sampler {name}"
    quiet_libraries()
    try:
        sampler = named_config(config, overrides).sampler if config is not None else None
        options = sampler.options if sampler is not None and sampler.name == name else {}
        with tempfile.TemporaryDirectory(prefix="condensegrpo-") as temporary:
            outcome = parity_trial(parity_config(name, options), RunFolder.create(Path(temporary) / "run"))
    except CondenseError as error:
        return [problem(area, str(error), "see condensegrpo plugins and docs/how-to/sample-with-vllm.md")]
    return parity_findings(area, outcome)


def parity_findings(area: str, outcome: "ParityTrial") -> list[Finding]:
    """What a trial says: a finding for each stage and temperature."""
    if not outcome.moved_enough:
        text = f"the optimiser step changed the log-probabilities by {outcome.moved:.1e} nats only: no conclusion"
        return [problem(area, text, "report this: the change should be far larger")]
    findings = []
    for stage, parities in (("as loaded", outcome.before), ("after an optimiser step", outcome.after)):
        for parity in parities:
            sign = "−" if parity.mean_ratio < 1 else "+"
            text = (
                f"{stage}, temperature {parity.temperature:g}: largest difference from the learner "
                f"{parity.largest_gap:.1e} nats, mean ratio 1 {sign} {abs(parity.mean_ratio - 1):.1e}, "
                f"{parity.tokens} tokens"
            )
            findings.append(ok(area, text) if parity.holds(outcome.bounds) else problem(area, text, CURE))
    return findings


def gpu_findings(config: str | None, overrides: Sequence[str]) -> list[Finding]:
    """The findings of every trial on the devices that torch sees."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        return [problem("GPU", f"torch {torch.__version__} sees none", INSTALL)]
    return try_all(count, config, overrides)


def try_all(devices: int, config: str | None, overrides: Sequence[str]) -> list[Finding]:
    """The findings of every trial, with as many ranks as there are devices."""
    findings: list[Finding] = []
    console = theme.console(sys.stderr)
    for name, trial in TRIALS.items():
        if trial.devices > devices:
            findings.append(ok(name, "not tried: it needs two devices"))
            continue
        with console.status(f"{trial.phase} …"):
            findings += run_trial(name, (*([config] if config else []), *overrides), ranks=devices)
    return findings


def run_trial(
    name: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    seconds: float | None = None,
    module: str = "condensegrpo.cli.doctor_trials",
) -> list[Finding]:
    """The findings of a trial in a process of its own; that it hangs or dies is a finding too.

    Args:
        seconds: time limit, instead of the trial's own.
    """
    seconds = TRIALS[name].seconds if seconds is None else seconds
    with tempfile.TemporaryDirectory(prefix="condensegrpo-") as folder:
        file, launcher = Path(folder) / "findings.json", ["-m", module]
        if TRIALS[name].on_all_devices and ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *launcher]
        command = [sys.executable, *launcher, name, str(file), *arguments]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            try:
                printed = process.communicate(timeout=seconds)[0][-TAIL:].strip()
            except subprocess.TimeoutExpired:
                return [problem(name, f"no answer after {seconds:g} s", TRIALS[name].cure)]
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        if not file.is_file():
            text = f"the check ended with code {process.returncode}: {printed}"
            return [problem(name, text, TRIALS[name].cure)]
        findings = json.loads(file.read_text(encoding="utf-8"))
    return [Finding(**{**finding, "level": Level(finding["level"])}) for finding in findings]


def try_device(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """The devices, and whether one multiplies in the run's type of numbers."""
    import torch

    from condensegrpo.learner.devices import DTYPES

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ones = torch.ones(1024, 1024, dtype=DTYPES[config.model.dtype], device=device)
    product = float((ones @ ones).float().mean())
    if product != 1024:
        return [problem("multiplication", f"1024 × 1024 ones give {product}, not 1024", "the device is faulty")]
    if device == "cuda" and config.model.dtype == "float32":
        cure = "model.dtype=bfloat16 halves the memory and is several times as fast"
        return [warning("multiplication", "the run computes in float32", cure)]
    return [ok("multiplication", f"{config.model.dtype} works on {device}")]


def try_ranks(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """A sum over all ranks as the learner takes it: every rank is a process of its own."""
    import torch
    from torch import distributed

    from condensegrpo.learner import ranks
    from condensegrpo.learner.deepspeed_import import get_accelerator

    ranks.join()
    values = torch.full((SENT // 4,), float(ranks.rank() + 1), device=get_accelerator().current_device_name())

    def add_up(rounds: int) -> float:
        began = time.monotonic()
        for _ in range(rounds):
            distributed.all_reduce(values)
            values.div_(ranks.world_size())
        get_accelerator().synchronize()
        return time.monotonic() - began

    add_up(1)  # connects the ranks
    seconds = add_up(ROUNDS)
    size, expected = ranks.world_size(), (ranks.world_size() + 1) / 2  # the mean of 1, 2, … N, which stays as it is
    ranks.barrier()
    if float(values[0]) != expected or float(values[-1]) != expected:
        text = f"the mean of the ranks' numbers is {float(values[0])}, wanted {expected}"
        return [problem("ranks", text, "NCCL_P2P_DISABLE=1 tries another way between the devices")]
    rate = ROUNDS * SENT / seconds / 1e9
    return [ok("ranks", f"{size} ranks add up {SENT >> 20} MiB over {distributed.get_backend()}: {rate:.1f} GB/s")]


def try_files(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """The model and the data sets of a configuration: what is not on this machine yet is downloaded."""
    from huggingface_hub import snapshot_download

    from condensegrpo.assembly.build import build
    from condensegrpo.learner.model_folder import local_source
    from condensegrpo.storage.hub import model_fault

    build(config)  # reads the data
    path = config.model.path
    if path is not None and not Path(path).expanduser().is_dir():
        if local_source(path) is None and (fault := model_fault(path)):
            return [problem("files", f"model.path={path} is no folder, and {fault}", f"hf download {path}")]
        snapshot_download(path, allow_patterns=MODEL_FILES)
    return [ok("files", "model and data are on this machine")]


def try_sampler(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """Sampler and learner on a tiny model, with the run's type of numbers, kernel, adapters and sampler options.

    Every rank has them, and those that share a copy of the model (``tensor_parallel_size``) share it. The model has as
    many heads as they need. The findings are those of the first rank that fails, or of the first one.
    """
    from condensegrpo.config.load import vary
    from condensegrpo.learner import ranks
    from condensegrpo.samplers.vllm.settings import ranks_a_copy
    from condensegrpo.training.parity import parity_config, parity_trial

    ranks.join()
    tiny, model = parity_config(config.sampler.name, config.sampler.options), config.model
    heads = max(2, ranks_a_copy(config.sampler.options))
    lora = "null" if model.lora is None else json.dumps(asdict(model.lora))
    sizes = (f"model.new.heads={heads}", f"model.new.hidden_size={32 * heads}")
    tiny = vary(
        tiny, (*sizes, f"model.dtype={model.dtype}", f"model.attention={model.attention}", f"model.lora={lora}")
    )
    trials = ranks.gather(parity_trial(tiny, ranks.from_first(folder)))
    worst = next((trial for trial in trials if not trial.passed), trials[0])
    area = f"sampler {config.sampler.name}{f', {len(trials)} ranks' if len(trials) > 1 else ''}"
    return parity_findings(area, worst)


def try_attention(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """The kernels of the learner's attention against SDPA, with the heads and numbers of the run's model."""
    from condensegrpo.learner.attention_kernels import check_kernel

    findings = []
    for check in (check_kernel(kernel, *attends(config)) for kernel in ("flex", "flash")):
        area, chosen = f"attention, {check.kernel}", config.model.attention == check.kernel
        if check.fault is None:
            findings.append(ok(area, f"output and gradients differ from SDPA by {check.difference:.1e} of their norm"))
        elif chosen:
            findings.append(problem(area, check.fault, "set model.attention=auto, which takes another kernel"))
        else:
            findings.append(warning(area, check.fault, "not needed: without it another kernel is used"))
    return findings


def try_transfer(config: "RunConfig", folder: "RunFolder") -> list[Finding]:
    """Weights from the learner to a server on the second device, over NCCL on GPUs, and what it samples with them."""
    import torch

    from condensegrpo.config.load import vary
    from condensegrpo.training.parity import parity_config, parity_trial

    transport = "nccl" if torch.cuda.is_available() else "folder"
    tiny = vary(
        parity_config("vllm_server", {"server": {"weights": transport}}), (f"model.dtype={config.model.dtype}",)
    )
    return parity_findings(f"server, weights={transport}", parity_trial(tiny, folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What ``doctor --gpu`` tries in a process of its own."""

    phase: str  # what the user reads while it runs
    run: Callable[["RunConfig", "RunFolder"], list[Finding]]
    on_all_devices: bool = False  # with a rank on every device; else one process
    devices: int = 1  # the fewest that it needs
    seconds: float | None = SECONDS  # time limit; None: as long as it takes
    cure: str = AGAIN  # if it hangs or dies


TRIALS: Mapping[str, Trial] = {
    "files": Trial(phase="downloading model and data", run=try_files, seconds=None),
    "device": Trial(phase="multiplying on a device", run=try_device),
    "ranks": Trial(
        phase="adding up over the devices",
        run=try_ranks,
        on_all_devices=True,
        devices=2,
        cure="NCCL_DEBUG=INFO says where it stops; NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 tries another way",
    ),
    "attention": Trial(phase="comparing kernels of attention", run=try_attention, seconds=COMPILING_SECONDS),
    "sampler": Trial(
        phase="sampling, sleeping, learning a step, sending weights, sampling again",
        run=try_sampler,
        on_all_devices=True,
        seconds=COMPILING_SECONDS,
    ),
    "transfer": Trial(
        phase="sending weights to a server on another device",
        run=try_transfer,
        devices=2,
        seconds=COMPILING_SECONDS,
        cure="NCCL_DEBUG=INFO says where it stops; sampler.options.server.weights=folder needs no NCCL",
    ),
    "learner": Trial(
        phase="learning some steps on full micro-batches",
        run=try_learner,
        on_all_devices=True,
        seconds=COMPILING_SECONDS,
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a trial and write its findings; on several ranks the first one writes."""
    from condensegrpo.config.load import named_config
    from condensegrpo.display.console import quiet_libraries
    from condensegrpo.storage.run_folder import RunFolder

    parser = argparse.ArgumentParser()
    parser.add_argument("trial", choices=TRIALS)
    parser.add_argument("file", type=Path)
    parser.add_argument("config", nargs="*", help="a configuration and overrides of its keys")
    options = parser.parse_args(arguments)
    quiet_libraries()
    try:
        name, *overrides = options.config or ("quickstart", *USUAL)
        config = named_config(name, overrides)
        with tempfile.TemporaryDirectory(prefix="condensegrpo-") as temporary:
            findings = TRIALS[options.trial].run(config, RunFolder.create(Path(temporary) / "run"))
    except CondenseError as error:
        findings = [problem(options.trial, str(error), "correct it, and run doctor --gpu again")]
    if os.environ.get("RANK", "0") == "0":
        options.file.write_text(json.dumps([asdict(finding) for finding in findings]), encoding="utf-8")
        os._exit(0)  # torch and DeepSpeed take seconds to leave


if __name__ == "__main__":
    main()
