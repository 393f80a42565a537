"""``condensegrpo plugins``: what is installed, by kind, and whether it loads."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from condensegrpo.cli import theme
from condensegrpo.cli.neutral import neutral, one_line
from condensegrpo.core.errors import PluginError
from condensegrpo.core.plugins import KINDS, installed, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """One plug-in."""

    kind: str
    name: str
    object: str  # module:attribute
    distribution: str  # name and version; empty if not known
    summary: str  # first line of its docstring
    error: str  # why it does not load; empty: it does


def plugins(
    kind: Annotated[str | None, typer.Argument(help=f"Only one of {', '.join(KINDS)}.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the plug-ins by kind: name, object, origin, and whether it loads. Exit code 1 if one does not."""
    if kind is not None and kind not in KINDS:
        raise PluginError(f"listing plug-ins of kind {kind!r}: there are {', '.join(KINDS)}.")
    found = [inspected(each, point) for each in ((kind,) if kind else KINDS) for point in installed(each)]
    if as_json:
        typer.echo(json.dumps({"version": 1, "plugins": [asdict(one) for one in found]}))
    else:
        _show(found)
    if any(one.error for one in found):
        raise typer.Exit(1)


def inspected(kind: str, point: EntryPoint) -> Installed:
    """A plug-in with what can be told about it; it is loaded but not called."""
    summary, error = "", ""
    try:
        summary = (load(kind, point.name).__doc__ or "").strip().split("\n")[0]
    except PluginError as refusal:
        error = str(refusal)
    origin = point.dist
    return Installed(
        kind=kind,
        name=point.name,
        object=point.value,
        distribution=f"{origin.name} {origin.version}" if origin is not None else "",
        summary=summary,
        error=error,
    )


def _show(found: Sequence[Installed]) -> None:
    table = Table(box=box.SIMPLE_HEAD, header_style=theme.DIM, padding=(0, 1, 0, 0))
    for heading in ("kind", "name", "object", "from", ""):
        table.add_column(heading, overflow="fold")
    last = ""
    for one in found:
        state = Text(f"✗ {one_line(one.error, 300)}", theme.BAD) if one.error else Text(neutral(one.summary), theme.DIM)
        kind = Text(one.kind if one.kind != last else "", "bold")
        table.add_row(kind, Text(one.name), Text(one.object, theme.HEAD), Text(one.distribution), state)
        last = one.kind
    console = theme.console()
    console.print(table)
    console.print(Text("A plug-in in a file needs no installation: path/to/file.py:Name.", theme.DIM))
