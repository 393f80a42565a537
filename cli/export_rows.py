"""``condensegrpo export-rows``: rows of training data for the trainers of others."""

import json
from pathlib import Path
from typing import Annotated

import typer

from condensegrpo.cli.options import run_folders
from condensegrpo.core.wording import plural
from condensegrpo.integrations.rows import System, export_rows
from condensegrpo.storage.files import write_atomically


def export_rows_command(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN|FILE", help="A run folder, or trajectories.", autocompletion=run_folders),
    ],
    to: Annotated[System, typer.Option(help="The trainer whose structure the rows have.")],
    step: Annotated[int | None, typer.Option(min=0, help="A step of the run; by default all.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write into this file, not to the terminal.")] = None,
) -> None:
    """Write trajectories as rows for another trainer, a JSON object a line: ids, masks, log-probabilities, credit.

    Example: condensegrpo export-rows runs/quickstart --to trl --out rows.jsonl
    """
    lines = [json.dumps(row) for row in export_rows(source, to, step=step)]
    if out is None:
        for line in lines:
            typer.echo(line)
        return
    write_atomically(out, "".join(f"{line}\n" for line in lines))
    typer.echo(f"{plural(len(lines), 'row')} for {to} → {out}")
