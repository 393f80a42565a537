"""``condensegrpo import``: logs of other libraries as trajectory files."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from condensegrpo.core.wording import counted
from condensegrpo.integrations.episodes import TEXT_ONLY, LogFormat
from condensegrpo.storage.credit import Credit, write_credit
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import write_trajectory


def import_log(
    form: Annotated[LogFormat, typer.Argument(metavar="FORMAT", help="trl, verifiers or inspect-ai.")],
    log: Annotated[
        Path,
        typer.Argument(
            exists=True, help="trl: completions/ or a file in it; traces.jsonl, results.jsonl; .json, .eval."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="New folder, for inspect.")],
) -> None:
    """Read a trajectory log of TRL, verifiers or Inspect, so that inspect shows it.

    Example: condensegrpo import verifiers outputs/wordle/traces.jsonl imported/wordle
    """
    from condensegrpo.integrations.logs import read_log

    imported = read_log(log, form)
    folder = RunFolder.create(out)
    write_atomically(folder.config, f"# imported from {form.value}: there is no configuration\nname: {out.name}\n")
    credit = dict[int, list[Credit]]()
    for each in imported:
        write_trajectory(folder.trajectories(each.step), each.scored)
        if each.advantages is not None:  # the log has no weights
            known = Credit(
                trajectory=each.scored.trajectory.id,
                advantages=each.advantages,
                weights=(1.0,) * len(each.advantages),
            )
            credit.setdefault(each.step, []).append(known)
    for step, rows in credit.items():
        write_credit(folder.credit(step), rows)
    steps = len({each.step for each in imported})
    typer.echo(f"{counted(len(imported), 'trajectory', 'trajectories')} of {counted(steps, 'step')}: {TEXT_ONLY}")
    typer.echo(f"next: condensegrpo inspect {shlex.quote(str(out))}")
