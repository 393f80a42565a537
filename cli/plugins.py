"""``condensegrpo plugins``: the installed plug-ins by kind, and whether they load.

The package's own plug-ins are described from their source: importing them would import torch, which takes seconds.
Plug-ins of other packages are imported, because only that shows whether they load.
"""

import ast
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from condensegrpo.cli.options import AsJson
from condensegrpo.core.errors import PluginError
from condensegrpo.core.plugins import KINDS, installed, load
from condensegrpo.display import theme
from condensegrpo.display.theme import neutral, one_line

OURS = "condensegrpo"  # the name of our distribution
NAME_WIDTH = 22


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
    kind: Annotated[str | None, typer.Argument(help=f"Only this kind: {', '.join(KINDS)}.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the plug-ins by kind: name, summary, object and package. Exit code 1 if a plug-in does not load."""
    if kind is not None and kind not in KINDS:
        raise PluginError(f"listing plug-ins: found the kind {kind!r}, wanted one of {', '.join(KINDS)}.")
    kinds = (kind,) if kind else KINDS
    listed = [describe_plugin(name, point) for name in kinds for point in installed(name)]
    if as_json:
        typer.echo(json.dumps({"version": 1, "plugins": [asdict(plugin) for plugin in listed]}))
    else:
        _show(listed)
    if any(plugin.error for plugin in listed):
        raise typer.Exit(1)


def describe_plugin(kind: str, point: EntryPoint) -> InstalledPlugin:
    """Describe a plug-in without calling it; one of another package is imported."""
    package = point.dist
    docstring, error = None, ""
    if package is not None and package.name == OURS:
        docstring = docstring_in_source(point)
    if docstring is None:
        try:
            plugin = load(kind, point.name)
            docstring = getattr(plugin, "function", plugin).__doc__ or ""
        except PluginError as refusal:
            docstring, error = "", str(refusal)
    return InstalledPlugin(
        kind=kind,
        name=point.name,
        object=point.value,
        distribution=f"{package.name} {package.version}" if package is not None else "",
        summary=docstring.strip().split("\n")[0],
        error=error,
    )


def docstring_in_source(point: EntryPoint) -> str | None:
    """The docstring of the class or function that an entry point names, read from its file.

    Imports no more than its folder in ``condensegrpo``, which is light. None if no file defines such an object.
    """
    package, folder, *inner = point.module.split(".")
    spec = find_spec(f"{package}.{folder}")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent.joinpath(*inner).with_suffix(".py")
    for statement in ast.parse(file.read_bytes()).body if file.is_file() else ():
        if (
            isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and statement.name == point.attr
        ):
            return ast.get_docstring(statement)
    return None


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
