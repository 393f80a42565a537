"""``condensegrpo train``."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from condensegrpo.cli.debugging import Debug, tracebacks
from condensegrpo.cli.interrupts import StopRequest
from condensegrpo.cli.summary import print_summary
from condensegrpo.core.errors import CondenseError, ConfigError, Interrupted, RunError
from condensegrpo.core.observer import Observer, Silent
from condensegrpo.core.wording import counted
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from condensegrpo.assembly.components import Components
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.core.protocols import Split

SPLITS: tuple["Split", ...] = ("train", "eval")


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="A YAML file or the name of a shipped configuration, then overrides of its keys.",
        ),
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue the run in this folder.")] = None,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="With --resume: accept changed keys that change what is learned."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything, print the resolved configuration and the origin of each value, load no model.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train a policy: warm start, then GRPO on condensed multi-turn trajectories.

    Example: condensegrpo train configs/quickstart.yaml train.steps=40 seed=1
    """
    with tracebacks(shown=debug):
        _train(arguments or [], resume, dry_run=dry_run, allow_changes=allow_changes, debug=debug)


def _train(arguments: list[str], resume: Path | None, *, dry_run: bool, allow_changes: bool, debug: bool) -> None:
    from condensegrpo.cli.console import PhaseDisplay
    from condensegrpo.config.load import dump_with_origins, load_config
    from condensegrpo.config.resumed import change_table, resumed_config
    from condensegrpo.learner.launchers import join_launch

    join_launch(os.environ)
    path, overrides = _source(arguments, resume)
    changes = ""
    if resume:
        config, changed = resumed_config(RunFolder.open(resume), overrides, allow_changes=allow_changes)
        changes = f"changed since the run was last started:\n{change_table(changed)}" if changed else ""
    elif allow_changes:
        raise ConfigError("reading the options: found --allow-changes without --resume. Add --resume RUN.")
    else:
        config = load_config(path, overrides)
    with PhaseDisplay(Console(stderr=True)) as display:
        display.phase("checking the configuration", None)
        from condensegrpo.assembly.build import build
        from condensegrpo.assembly.preflight import check_run

        components = build(config)
        notes = check_run(components, resumed=resume is not None)
    if dry_run:
        typer.echo("".join(f"# {line}\n" for line in changes.splitlines()), nl=False)
        for note in notes:
            typer.echo(f"# {note}")
        for split in SPLITS:
            problems = components.problems(split)
            count = counted(len(problems), "problem", "problems")
            typer.echo(f"# {split}: {count}, the first: {problems[0].question[:80]!r}")
        typer.echo(dump_with_origins(config, path, overrides, stored=resume is not None), nl=False)
    elif int(os.environ.get("RANK", "0")) > 0:
        if not _run(config, components, RunFolder(Path()), Silent()):
            raise typer.Exit(130)
    else:
        _train_as_first_rank(config, components, resume, (*([changes] if changes else []), *notes), debug=debug)


def _source(arguments: list[str], resume: Path | None) -> tuple[Path, list[str]]:
    """The YAML file and the overrides that give the configuration."""
    from condensegrpo.config.load import find_config

    names = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if resume is not None:
        if names:
            raise ConfigError(
                f"resuming {resume}: found the configuration {names[0]} as well, but a run keeps its own. Leave it out."
            )
        return RunFolder.open(resume).config, overrides
    if len(names) != 1:
        raise ConfigError(
            f"reading the arguments: wanted one CONFIG and KEY=VALUEs, found {len(names)} arguments without '='"
            f"{': ' + ', '.join(names) if names else ''}. Name one, such as quickstart or path/to/file.yaml."
        )
    return find_config(names[0]), overrides


def _new_folder(config: "RunConfig") -> RunFolder:
    """Create the run's folder and write its configuration; a name in use gets a number, so no run is overwritten."""
    from condensegrpo.config.load import dump_config

    number, path = 1, Path(config.runs_dir) / config.name
    while path.exists():
        number += 1
        path = Path(config.runs_dir) / f"{config.name}-{number}"
    folder = RunFolder.create(path)
    write_atomically(folder.config, dump_config(config))
    return folder


def _train_as_first_rank(
    config: "RunConfig", components: "Components", resume: Path | None, notes: Sequence[str], *, debug: bool
) -> None:
    """Train as rank 0, which shows the progress (first, notes on the configuration) and writes the files."""
    from condensegrpo.cli.console import TrainingConsole

    folder = RunFolder.open(resume) if resume else _new_folder(config)
    with folder.locked():
        with TrainingConsole(steps=config.train.steps, log=folder.log, debug=debug) as console:
            console.say(f"run folder {folder.path}")
            for note in notes:
                console.say(note)
            console.phase("loading DeepSpeed", None)
            try:
                finished = _run(config, components, folder, console)
            except CondenseError as error:
                with suppress(RunError):  # the log may be what cannot be written
                    console.record(f"error: {error}")
                raise
        from condensegrpo.reporting.run_report import write_page, write_report

        if finished:
            write_report(folder.path)
            print_summary(folder)
        else:
            with suppress(RunError):  # nothing was measured yet
                write_page(folder.path)
    if not finished:
        typer.echo(f"stopped. To continue: condensegrpo train --resume {folder.path}")
        raise typer.Exit(130)


def _run(config: "RunConfig", components: "Components", folder: RunFolder, observer: Observer) -> bool:
    """Train as this rank, in the folder of rank 0. False: stopped before the last step."""
    stop = StopRequest()
    from condensegrpo.cli.quiet import quiet_libraries
    from condensegrpo.learner import ranks
    from condensegrpo.training.train import train as run_training

    quiet_libraries()
    ranks.join(config.learner.timeout_minutes)
    folder = ranks.from_first(RunFolder(folder.path.absolute()))  # ranks may work in different folders
    try:
        return run_training(components, folder, observer=observer, stopping=stop.requested)
    except Interrupted as reason:
        observer.say(str(reason))
        return False
