"""Checks of one configuration on this machine: its data, plug-ins and model. Reads headers of files; loads no model."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.cli.doctor_machine import disk_finding, sandbox_finding
from condensegrpo.cli.doctor_model import model_findings
from condensegrpo.cli.findings import Finding, ok, problem, warning
from condensegrpo.core.errors import CondenseError, DataError, PluginError
from condensegrpo.storage.hub import hub_fault

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig

FILES = ("corpus", "folder", "ground_truth_file")  # options of shipped plug-ins that name a file or folder
LUCENE = "search_lucene"


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
    for key, place in (("task.data", config.task.data), ("task.eval_data", config.task.eval_data)):
        if place is not None:
            yield _data_file(key, place)
    yield from _files("task.options", config.task.options)
    for number, (name, options) in enumerate(_tools(config)):
        yield from _files(f"rollout.tools.use.{number}.options", options)
        if name == LUCENE:
            yield from lucene_findings(shutil.which("java"), installed=find_spec("pyserini") is not None)


def _data_file(key: str, place: str) -> Finding:
    path = Path(place).expanduser()
    if path.exists():
        return ok(key, str(path))
    looks_like_file = path.suffix in (".jsonl", ".json", ".parquet", ".gz") or place.startswith((".", "/", "~"))
    if looks_like_file:
        return problem(key, f"{place} does not exist", f"set {key} to an existing file or folder")
    fault = hub_fault()
    if fault is not None:
        return problem(key, f"{place} is not a file, and {fault}", f"set {key} to an existing file")
    return warning(key, f"{place} is not a file on this machine", "it will be loaded from the Hub")


def _tools(config: "RunConfig") -> list[tuple[str, Mapping[str, object]]]:
    """The name and the options of every tool."""
    return [(tool, {}) if isinstance(tool, str) else (tool.name, tool.options) for tool in config.rollout.tools.use]


def _files(key: str, options: Mapping[str, object]) -> Iterator[Finding]:
    for option in FILES:
        if isinstance(place := options.get(option), str):
            path, name = Path(place).expanduser(), f"{key}.{option}"
            yield ok(name, str(path)) if path.exists() else problem(name, f"{path} does not exist", f"correct {name}")


def lucene_findings(java: str | None, *, installed: bool) -> list[Finding]:
    """Check what only the tool search_lucene needs.

    Args:
        java: path of the program; None if it is not installed.
        installed: whether pyserini is installed.
    """
    instead = "or use the tool search, which needs neither Java nor pyserini"
    return [
        ok("Java", java) if java else problem("Java", "no java on the PATH", f"install Java 21, {instead}"),
        ok("pyserini", "installed")
        if installed
        else problem("pyserini", "not installed", f"pip install pyserini, {instead}"),
    ]
