"""What a configuration reads besides its model: problems, corpora, folders, indices, and Java for one of the tools."""

import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from condensegrpo.cli.doctor_machine import offline
from condensegrpo.cli.findings import Finding, ok, problem, warning

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig

FILES = ("corpus", "folder", "ground_truth_file")  # options of plug-ins of ours that name a file or a folder
LUCENE = "search_lucene"


def data_findings(config: "RunConfig") -> list[Finding]:
    """Whether everything that a configuration reads is there, one finding each."""
    named = (("task.data", config.task.data), ("task.eval_data", config.task.eval_data))
    return [
        *(_data_file(key, place) for key, place in named if place is not None),
        *_files("task.options", config.task.options),
        *_tools(config),
    ]


def _data_file(key: str, place: str) -> Finding:
    path = Path(place).expanduser()
    if path.exists():
        return ok(key, str(path))
    looks_like_file = path.suffix in (".jsonl", ".json", ".parquet", ".gz") or place.startswith((".", "/", "~"))
    if looks_like_file:
        return problem(key, f"{place} does not exist", f"give the path of a file or folder: {key}=…")
    if offline():
        return problem(key, f"{place} is no file, and HF_HUB_OFFLINE is set", f"give the path of a file: {key}=…")
    return warning(key, f"{place} is no file here", "it will be looked for on the Hub")


def _tools(config: "RunConfig") -> Iterator[Finding]:
    for place, tool in enumerate(config.rollout.tools):
        name, options = (tool, {}) if isinstance(tool, str) else (tool.name, tool.options)
        yield from _files(f"rollout.tools.{place}.options", options)
        if name == LUCENE:
            yield from lucene_findings(shutil.which("java"), installed=find_spec("pyserini") is not None)


def _files(key: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    for option in FILES:
        if isinstance(options.get(option), str):
            path = Path(options[option]).expanduser()
            cure = f"give its path: {key}.{option}=…"
            there = path.exists()
            yield (
                ok(f"{key}.{option}", str(path))
                if there
                else problem(f"{key}.{option}", f"{path} does not exist", cure)
            )


def lucene_findings(java: str | None, *, installed: bool) -> list[Finding]:
    """What the tool search_lucene needs and no other does.

    Args:
        java: path of the program; None: there is none.
        installed: whether pyserini is.
    """
    instead = "or take the tool search, which needs neither Java nor pyserini"
    return [
        ok("Java", java) if java else problem("Java", "no java on the PATH", f"install a Java 21, {instead}"),
        ok("pyserini", "installed")
        if installed
        else problem("pyserini", "not installed", f"pip install pyserini, {instead}"),
    ]
