"""``condensegrpo quickstart``."""

from typing import Annotated

import typer

from condensegrpo.cli.train import train


def quickstart(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the shipped configuration.")
    ] = None,
) -> None:
    """Train the built-in reading task offline, in a few minutes of a CPU, into runs/quickstart of this folder.

    Example: condensegrpo quickstart train.steps=20
    """
    train(["quickstart", *(overrides or [])])
