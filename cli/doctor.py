"""``condensegrpo doctor``: checks this machine, and a configuration on it, and says how to fix what is wrong.

A configuration is checked with its data, plug-ins and model: headers of files are read, and no model is loaded.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from condensegrpo.cli.doctor_machine import (
    GIB,
    Finding,
    Level,
    disk_finding,
    free_memory,
    machine_findings,
    ok,
    problem,
    sandbox_finding,
    warning,
)
from condensegrpo.cli.options import AsJson, Overrides
from condensegrpo.core.errors import CondenseError, ConfigError, DataError, PluginError
from condensegrpo.core.wording import counted
from condensegrpo.display import theme
from condensegrpo.display.console import waiting_for
from condensegrpo.display.theme import neutral
from condensegrpo.storage.files import placeholder_in
from condensegrpo.storage.hub import hub_fault

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig

FILES = ("corpus", "folder", "ground_truth_file")  # options of shipped plug-ins that name a file or folder
LARGE = 400e6  # parameters above which training on a CPU takes hours instead of minutes
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
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
            from condensegrpo.cli.doctor_trials import gpu_findings

            tried = gpu_findings(config, overrides or ())
        display.phase("checking this machine", None)
        findings = [*machine_findings(), disk_finding(runs_dir)]
        if config is not None:
            display.phase(f"checking {config}", None)
            findings += [finding for finding in config_findings(config, overrides or ()) if finding not in findings]
        if sampler is not None:
            display.phase(f"comparing {sampler} with the learner", None)
            from condensegrpo.cli.doctor_trials import sampler_findings

            findings += sampler_findings(sampler, config, overrides or [])
        findings += tried
    if as_json:
        typer.echo(json.dumps({"version": 1, "findings": [asdict(finding) for finding in findings]}))
    else:
        print_findings(findings, theme.console())
    if any(finding.level is Level.PROBLEM for finding in findings):
        raise typer.Exit(1)


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """One line a finding, its cure below it, and a closing count."""
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
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    warnings = counted(counts[Level.WARNING], "warning")
    problems = counted(counts[Level.PROBLEM], "problem")
    console.print(Text(f"\n{counts[Level.OK]} ok, {warnings}, {problems}"))


def config_findings(name: str, overrides: Sequence[str]) -> list[Finding]:
    """Check that a configuration is valid and that everything it names exists."""
    from condensegrpo.config.load import named_config

    try:
        config = named_config(name, overrides)
    except CondenseError as error:
        return [problem("configuration", str(error), "correct the file or the overrides")]
    return [
        ok("configuration", f"{name} is valid"),
        *data_findings(config),
        *_run(config),
        *model_findings(config),
        disk_finding(Path(config.runs_dir)),
        *([sandbox_finding(config.sandbox.isolation)] if config.sandbox.isolation != "auto" else []),
    ]


def _run(config: "RunConfig") -> Iterator[Finding]:
    """The checks of ``train --dry-run``."""
    from condensegrpo.assembly.build import build
    from condensegrpo.assembly.preflight import check_run

    try:
        components = build(config)
        yield ok("plug-ins", f"{', '.join(_named(config))}: all load")
        yield from (ok("training", note) for note in check_run(components))
    except DataError as error:
        yield problem("data", str(error), "correct the data, or give other files (docs/reference/tasks.md)")
    except PluginError as error:
        yield problem("plug-ins", str(error), "condensegrpo plugins lists what is installed")
    except CondenseError as error:
        yield problem("training", str(error), "correct the configuration or the overrides")


def _named(config: "RunConfig") -> tuple[str, ...]:
    """The names of the plug-ins."""
    sections = (config.task, config.condenser, config.reward, config.sampler)
    return (*(section.name for section in sections), *(name for name, _ in _tools(config)))


def data_findings(config: "RunConfig") -> Iterator[Finding]:
    """Check that every file and folder that a configuration reads besides its model exists."""
    for key, name in (("task.data", config.task.data), ("task.eval_data", config.task.eval_data)):
        if name is not None:
            yield _data_file(key, name)
    made = ("folder",) if config.task.name == "textworld" else ()  # of its games, in which a run makes them
    yield from _files("task.options", {name: of for name, of in config.task.options.items() if name not in made})
    for number, (_, options) in enumerate(_tools(config)):
        yield from _files(f"rollout.tools.use.{number}.options", options)


def _data_file(key: str, name: str) -> Finding:
    path = Path(name).expanduser()
    if path.exists() or glob(str(path), recursive=True):  # a pattern, of the task textworld
        return ok(key, str(path))
    looks_like_file = path.suffix in (".jsonl", ".json", ".parquet", ".gz") or name.startswith((".", "/", "~"))
    if looks_like_file:
        return problem(key, f"{name} does not exist", f"set {key} to an existing file or folder")
    fault = hub_fault()
    if fault is not None:  # it may be in the cache: the run's checks load it
        cure = f"load it once with network, or set {key} to an existing file, if the checks below do not find it"
        return warning(key, f"{name} is not a file on this machine, and {fault}", cure)
    return warning(key, f"{name} is not a file on this machine", "it will be loaded from the Hub")


def _tools(config: "RunConfig") -> list[tuple[str, Mapping[str, object]]]:
    """The name and the options of every tool."""
    return [(tool, {}) if isinstance(tool, str) else (tool.name, tool.options) for tool in config.rollout.tools.use]


def _files(key: str, options: Mapping[str, object]) -> Iterator[Finding]:
    for option in FILES:
        if isinstance(file := options.get(option), str):
            path, name = Path(file).expanduser(), f"{key}.{option}"
            yield ok(name, str(path)) if path.exists() else problem(name, f"{path} does not exist", f"correct {name}")


def model_findings(config: "RunConfig") -> list[Finding]:
    """Check that the model exists and that the run fits this machine."""
    if config.model.new is not None:
        findings = [ok("model", "a new model")]
    elif (folder := Path(config.model.path or "")).is_dir():
        findings = _model_folder(folder)
    else:
        findings = [_hub_model(str(config.model.path))]
    complete = all(finding.level is Level.OK for finding in findings)
    return [*findings, memory_finding(config, devices(), free_memory())] if complete else findings


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
    if not any((folder / name).is_file() for name in TOKENIZERS):
        cure = "copy the tokenizer's files into the folder, or save it with tokenizer.save_pretrained"
        findings.append(problem("tokenizer", f"{folder} has none of {', '.join(TOKENIZERS)}", cure))
    elif not _has_template(folder):
        cure = "use the instruct model, or put a chat_template.jinja into the folder"
        findings.append(problem("chat template", f"{folder} has none", cure))
    return findings or [ok("model", f"{folder}: found config.json, tokenizer and chat template")]


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and '"chat_template"' in file.read_text(encoding="utf-8", errors="replace")


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


def devices() -> tuple[int, ...]:
    """Free memory of each GPU in bytes; () on a machine without GPUs."""
    import torch

    return tuple(int(torch.cuda.mem_get_info(index)[0]) for index in range(torch.cuda.device_count()))


def memory_finding(config: "RunConfig", gpus: Sequence[int], memory: int) -> Finding:
    """Check that the run fits each device, with one rank on each, as ``condensegrpo plan`` predicts it.

    Args:
        gpus: free bytes of each; (): everything is in main memory.
        memory: free bytes of main memory.
    """
    from condensegrpo.planning.architecture import architecture
    from condensegrpo.planning.plan import USABLE, plan
    from condensegrpo.planning.remedies import advice, remedy

    area, room = "model memory", min(gpus, default=memory)
    try:
        model = architecture(config.model)
        planned = plan(config, model, ranks=len(gpus) or 1, device="gpu" if gpus else "cpu", memory=room)
    except ConfigError as error:
        return problem(area, str(error), "see condensegrpo plan")
    text = f"{model.parameters / 1e6:.1f} M parameters; a device takes {planned.peak.bytes / GIB:.1f} GiB at most"
    if not planned.fits(room):
        cure = advice(planned, remedy(planned, room))
        free = f"{room / GIB:.1f} GiB are free, {USABLE:.0%} of them for tensors"
        return problem(area, planned.refusal or f"{text}; {free}", cure)
    if not gpus and model.parameters > LARGE:
        cure = "use a machine with a GPU, or a smaller model: model.path=…"
        return warning(area, f"{text}; this machine has no GPU", cure)
    return ok(area, text)
