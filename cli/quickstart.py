"""``condensegrpo quickstart``: trains the built-in ledger task offline, in a few minutes of a CPU."""

from pathlib import Path
from typing import Annotated

import typer

from condensegrpo.cli.train import train
from condensegrpo.storage.new_run import free_name


def quickstart(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the shipped configuration.")
    ] = None,
) -> None:
    """Train the built-in ledger task offline, in a few minutes of a CPU, into runs/quickstart of this folder.

    If that run exists, the new one is quickstart-2 and so on: no run that was trained is overwritten.

    Example: condensegrpo quickstart train.steps=20
    """
    given = dict(override.partition("=")[::2] for override in overrides or [])
    name = given.get("name") or free_name(Path(given.get("runs_dir", "runs")) / "quickstart")
    train(["quickstart", *(overrides or []), f"name={name}"])
