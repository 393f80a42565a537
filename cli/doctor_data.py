"""Checks of what a configuration reads besides its model: problems, corpora, folders, indices; Java for one tool."""

import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from condensegrpo.cli.findings import Finding, ok, problem, warning

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig

FILES = ("corpus", "folder", "ground_truth_file")  # options of shipped plug-ins that name a file or folder
LUCENE = "search_lucene"


def data_findings(config: "RunConfig") -> list[Finding]:
    """Check that every file and folder that a configuration reads exists."""
    named = (("task.data", config.task.data), ("task.eval_data", config.task.eval_data))
    return [
        *(_data_file(key, place) for key, place in named if place is not None),
        *_files("task.options", config.task.options),
        *_tools(config),
    ]


def _data_file(key: str, place: str) -> Finding:
    from huggingface_hub import constants

    path = Path(place).expanduser()
    if path.exists():
        return ok(key, str(path))
    looks_like_file = path.suffix in (".jsonl", ".json", ".parquet", ".gz") or place.startswith((".", "/", "~"))
    if looks_like_file:
        return problem(key, f"{place} does not exist", f"set {key} to an existing file or folder")
    if constants.HF_HUB_OFFLINE:
        return problem(key, f"{place} is not a file, and HF_HUB_OFFLINE is set", f"set {key} to an existing file")
    return warning(key, f"{place} is not a file on this machine", "it will be loaded from the Hub")


def _tools(config: "RunConfig") -> Iterator[Finding]:
    for place, tool in enumerate(config.rollout.tools.use):
        name, options = (tool, {}) if isinstance(tool, str) else (tool.name, tool.options)
        yield from _files(f"rollout.tools.use.{place}.options", options)
        if name == LUCENE:
            yield from lucene_findings(shutil.which("java"), installed=find_spec("pyserini") is not None)


def _files(key: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    for option in FILES:
        if isinstance(options.get(option), str):
            path = Path(options[option]).expanduser()
            name = f"{key}.{option}"
            exists = path.exists()
            yield ok(name, str(path)) if exists else problem(name, f"{path} does not exist", f"correct {name}")


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
