"""The option ``--debug`` of every command: tracebacks of errors, which are otherwise shown as one line."""

from collections.abc import Sequence
from typing import Annotated

import typer

NAME = "--debug"
DECLARED = ("train", "eval")  # the commands that declare it: they also show the tracebacks of failed trajectories
Debug = Annotated[bool, typer.Option(NAME, help="Show the tracebacks of errors and of failed trajectories.")]


def without_debug(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without the option, unless the command declares it."""
    declared = any(argument in DECLARED for argument in arguments[:1])
    return [argument for argument in arguments if declared or argument != NAME]
