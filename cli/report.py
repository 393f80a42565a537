"""``condensegrpo report``: writes a run's ``report.html`` again."""

import os
from pathlib import Path
from typing import Annotated

import typer

from condensegrpo.core.errors import RunError
from condensegrpo.display.console import waiting_for


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of a run that trains or that has ended.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write here, as of a run whose folder cannot be written.")
    ] = None,
) -> None:
    """Write a run's report.html again: curves of every metric, sample trajectories and the configuration.

    Example: condensegrpo report runs/quickstart
    """
    with waiting_for(f"writing the report of {run}"):
        from condensegrpo.reporting.run_report import write_page
        from condensegrpo.storage.run_folder import RunFolder

        folder = RunFolder.open(run).path
        if output is None and not os.access(folder, os.W_OK):
            raise RunError(
                f"writing the report of {run}: its folder cannot be written. Write it elsewhere: --output FILE."
            )
        page = write_page(folder, file=output)
    typer.echo(page)
