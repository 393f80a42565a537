"""``condensegrpo train``."""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from condensegrpo.cli.completion import config_names
from condensegrpo.cli.debugging import Debug
from condensegrpo.cli.interrupts import StopRequest
from condensegrpo.cli.summary import print_summary
from condensegrpo.core.errors import CondenseError, ConfigError, Interrupted, RunError
from condensegrpo.core.observer import Observer, Observers, Silent
from condensegrpo.core.wording import counted
from condensegrpo.storage.new_run import check_name, discard_replaced, new_run
from condensegrpo.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from condensegrpo.assembly.components import Components
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.core.protocols import Split

SPLITS: tuple["Split", ...] = ("train", "eval")


class Output(StrEnum):
    """What a training run prints."""

    CONSOLE = "console"
    QUIET = "quiet"  # errors alone
    JSON = "json"  # one object a line


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="A YAML file or the name of a shipped configuration, then overrides of its keys.",
            autocompletion=config_names,
        ),
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue the run in this folder.")] = None,
    continue_: Annotated[
        bool,
        typer.Option("--continue", help="Continue the run of this name if there is one, else start it: for scripts."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete a run of the same name, once the new one has learned something.")
    ] = False,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes", help="With --resume or --continue: accept changed keys that change what is learned."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything, print the resolved configuration and the origin of each value, load no model.",
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors alone; log.txt has the rest.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, for programs.")] = False,
    debug: Debug = False,
) -> None:
    """Train a policy: warm start, then GRPO on condensed multi-turn trajectories.

    Example: condensegrpo train configs/quickstart.yaml train.steps=40 seed=1 name=seed1
    """
    output = Output.JSON if as_json else Output.QUIET if quiet else Output.CONSOLE
    if allow_changes and not (resume or continue_):
        raise ConfigError("reading the options: found --allow-changes without --resume. Add --resume RUN.")
    _one_of({"--resume": bool(resume), "--continue": continue_, "--overwrite": overwrite})
    _one_of({"--quiet": quiet, "--json": as_json})
    config, run, text = _configuration(arguments or [], resume, continue_=continue_)
    changes = _changes(config, run, allow_changes=allow_changes) if run else ""
    if run is None and not dry_run and int(os.environ.get("RANK", "0")) == 0:
        check_name(Path(config.runs_dir) / config.name, overwrite=overwrite)
    components, notes = _checked(config, quiet=output is not Output.CONSOLE, resumed=run is not None)
    if dry_run:
        _print_dry_run(components, (*changes.splitlines(), *notes), text)
    elif int(os.environ.get("RANK", "0")) > 0:
        if not _run(components, RunFolder(Path()), Silent(), StopRequest()):
            raise typer.Exit(130)
    else:
        with _continued(run) if run else _created(config, overwrite=overwrite) as folder:
            said = (*([changes] if changes else []), *notes)
            _train_as_first_rank(components, folder, said, output, debug=debug)


def _one_of(options: Mapping[str, bool]) -> None:
    """Check that at most one of these options was given."""
    given = [option for option, is_given in options.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"reading the options: found {given[1]} with {given[0]}. Choose one of them.")


def _configuration(
    arguments: list[str], resume: Path | None, *, continue_: bool
) -> "tuple[RunConfig, RunFolder | None, Callable[[], str]]":
    """The configuration, the run that it continues if there is one, and its text with the origin of each value."""
    from condensegrpo.config.load import dump_with_origins, load_config, load_stored
    from condensegrpo.learner.launchers import join_launch

    join_launch(os.environ)
    path, overrides = _source(arguments, resume)
    run = RunFolder.open(resume) if resume else None
    config = load_stored(path, overrides) if run else load_config(path, overrides)
    named = RunFolder(Path(config.runs_dir) / config.name)
    if continue_ and named.trained:  # nothing is, until every rank has come this far
        run = named
    return config, run, lambda: dump_with_origins(config, path, overrides, stored=resume is not None)


def _changes(config: "RunConfig", run: RunFolder, *, allow_changes: bool) -> str:
    """What a configuration changes in the run that it continues."""
    from condensegrpo.config.resumed import allowed_changes, change_table

    changed = allowed_changes(run, config, allow_changes=allow_changes)
    return f"changed since the run was last started:\n{change_table(changed)}" if changed else ""


def _checked(config: "RunConfig", *, quiet: bool, resumed: bool) -> "tuple[Components, tuple[str, ...]]":
    """Build the components of a run and check them; also returns notes on the configuration."""
    from condensegrpo.cli.console import PhaseDisplay

    with PhaseDisplay(Console(stderr=True, quiet=quiet)) as display:
        display.phase("checking the configuration", None)
        from condensegrpo.assembly.build import build
        from condensegrpo.assembly.preflight import check_run

        components = build(config)
        return components, tuple(check_run(components, resumed=resumed))


def _print_dry_run(components: "Components", notes: Sequence[str], configuration: "Callable[[], str]") -> None:
    for note in notes:
        typer.echo(f"# {note}")
    for split in SPLITS:
        problems = components.problems(split)
        count = counted(len(problems), "problem", "problems")
        typer.echo(f"# {split}: {count}, the first: {problems[0].question[:80]!r}")
    typer.echo(configuration(), nl=False)


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


@contextmanager
def _continued(folder: RunFolder) -> Iterator[RunFolder]:
    """Lock the folder of a run that is continued."""
    with folder.locked():
        yield folder


def _created(config: "RunConfig", *, overwrite: bool) -> AbstractContextManager[RunFolder]:
    """Create the folder of a new run and write its configuration."""
    from condensegrpo.config.load import dump_config

    return new_run(Path(config.runs_dir) / config.name, dump_config(config), overwrite=overwrite)


def _train_as_first_rank(
    components: "Components", folder: RunFolder, notes: Sequence[str], output: Output, *, debug: bool
) -> None:
    """Train as rank 0, which shows the progress (first, notes on the configuration) and writes the files."""
    from condensegrpo.cli.console import TrainingConsole
    from condensegrpo.cli.run_log import JsonLines, RunLog

    steps, lines = components.config.train.steps, JsonLines()
    with ExitStack() as stack:
        log = stack.enter_context(RunLog(folder.log, steps=steps))
        console = TrainingConsole(steps=steps, debug=debug)
        shown = {Output.QUIET: (), Output.JSON: (lines,), Output.CONSOLE: (console,)}[output]
        if console in shown:
            stack.enter_context(console)
        observer = Observers(log, *shown)
        observer.say(f"run folder {folder.path}")
        for note in notes:
            observer.say(note)
        observer.phase("loading DeepSpeed", None)
        try:
            finished = _run(components, folder, observer, StopRequest(log.doing, console.announce))
        except CondenseError as error:
            with suppress(RunError):  # the log may be what cannot be written
                log.record(f"error: {error}")
            raise
        if finished:
            observer.phase("drawing the report", None)
            from condensegrpo.reporting.run_report import write_picture

            write_picture(folder.path)
    if output is Output.JSON:
        lines.emit("end", finished=finished, folder=str(folder.path))
    elif output is Output.CONSOLE and finished:
        print_summary(folder)
    elif output is Output.CONSOLE:
        typer.echo(f"stopped. To continue: condensegrpo train --resume {shlex.quote(str(folder.path))}")
    if not finished:
        raise typer.Exit(130)


def _run(components: "Components", folder: RunFolder, observer: Observer, stop: StopRequest) -> bool:
    """Train as this rank, in the folder of rank 0. False: stopped before the last step."""
    from condensegrpo.cli.quiet import quiet_libraries
    from condensegrpo.learner import ranks
    from condensegrpo.training.train import train as run_training

    quiet_libraries()
    ranks.join(components.config.learner.timeout_minutes)
    folder = ranks.from_first(RunFolder(folder.path.absolute()))  # ranks may work in different folders

    def stopping() -> bool:
        if ranks.rank() == 0:
            discard_replaced(folder)
        return stop.requested()

    try:
        return run_training(components, folder, observer=observer, stopping=stopping)
    except Interrupted as reason:
        observer.say(str(reason))
        return False
