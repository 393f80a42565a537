"""Shared by several commands: arguments, options, completion, addresses, summaries. Imports nothing heavy."""

import ast
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

import condensegrpo.configs
from condensegrpo.core.credentials import redacted
from condensegrpo.core.errors import ConfigError

DEBUG = "--debug"  # of every command: tracebacks of errors, which are otherwise shown as one line
DECLARED = ("train", "eval")  # the commands that declare it: they also show the tracebacks of failed trajectories
Debug = Annotated[bool, typer.Option(DEBUG, help="Show the tracebacks of errors and of failed trajectories.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of its keys.")]
AnyConfig = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file, the name of a shipped one, or a run folder.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def check_one_of(options: Mapping[str, object], advice: str = "Choose one of them.") -> None:
    """Check that at most one option is given: the others are false."""
    first, *more = [name for name, value in options.items() if value] or [""]
    if more:
        raise ConfigError(f"reading {first}: it goes without {', '.join(more)}. {advice}")


def without_debug(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without ``--debug``, unless the command declares it."""
    declared = any(argument in DECLARED for argument in arguments[:1])
    return [argument for argument in arguments if declared or argument != DEBUG]


def names_and_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without an equals sign or that are paths, which may hold one, and the others."""
    named = [argument for argument in arguments if "=" not in argument or os.path.exists(argument)]
    return named, [argument for argument in arguments if argument not in named]


def config_names(incomplete: str) -> list[str]:
    """The shipped configurations whose names begin so; where none does, the shell completes files."""
    shipped = Path(condensegrpo.configs.__file__).parent.glob("*.yaml")
    return sorted(file.stem for file in shipped if file.stem.startswith(incomplete))


def run_folders(incomplete: str) -> list[str]:
    """The runs in ``runs/`` whose paths begin so, sweeps' runs included."""
    configurations = (file for pattern in ("*/config.yaml", "*/*/config.yaml") for file in Path("runs").glob(pattern))
    return sorted(str(file.parent) for file in configurations if str(file.parent).startswith(incomplete))


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


def shown(text: str) -> str:
    """A text for the terminal that others may have written: see ``neutral``, ``redacted`` and ``as_typed``."""
    from condensegrpo.display.theme import as_typed, neutral

    return neutral(redacted(as_typed(text)))
