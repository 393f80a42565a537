"""``condensegrpo config`` and ``explain``: the keys of a configuration."""

import json
from typing import Annotated

import typer

from condensegrpo.cli.options import AsJson
from condensegrpo.config.keys import Key, explained, keys, others
from condensegrpo.config.load import shipped


def _shown(key: Key) -> str:
    default = f", default {key.default}" if key.default not in ("", "required") else f", {key.default}".rstrip(", ")
    return f"{key.name}  ({key.type}{default}){'  ' * bool(key.about)}{key.about}"


def config_command(
    listed: Annotated[bool, typer.Option("--list", help="List the keys, as by default.")] = True,
    names: Annotated[
        bool, typer.Option("--shipped", help="List the names of the shipped configurations instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List all keys of a configuration with type, default and meaning, or the shipped configurations.

    Example: condensegrpo config --list | grep context
    """
    if names:
        typer.echo(json.dumps({"version": 1, "shipped": shipped()}, indent=2) if as_json else "\n".join(shipped()))
        return
    if as_json:
        typer.echo(json.dumps({"version": 1, "keys": [key._asdict() for key in keys().values()]}, indent=2))
        return
    for key in keys().values():
        typer.echo(_shown(key))


def explain(
    key: Annotated[
        str,
        typer.Argument(
            help="A key or section, its last part, or a key of TRL or verl.",
            autocompletion=lambda incomplete: [name for name in keys() if name.startswith(incomplete)],
        ),
    ],
) -> None:
    """Explain one key of a configuration: type, default, meaning.

    Example: condensegrpo explain num_generations
    """
    found = explained(key)
    typer.echo(_shown(found))
    if named := others(found.name):
        typer.echo(f"in TRL or verl: {', '.join(named)}")
    for each in keys().values():
        if each.name.startswith(f"{found.name}."):
            typer.echo(_shown(each))
