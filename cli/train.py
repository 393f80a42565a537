"""``condensegrpo train``: starts a training run or resumes one, and shows its progress."""

import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from condensegrpo.cli.interrupts import StopRequest
from condensegrpo.cli.options import Debug, config_names, names_and_overrides
from condensegrpo.cli.streams import outlived_streams
from condensegrpo.cli.summary import print_summary
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.observer import Observers, Silent
from condensegrpo.core.process import postpone_collections
from condensegrpo.core.wording import counted
from condensegrpo.display.console import TrainingConsole, quiet_libraries, waiting_for
from condensegrpo.display.run_log import JsonLines, RunLog
from condensegrpo.learner.launchers import join_launch, launched_rank
from condensegrpo.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from condensegrpo.config.schema import RunConfig
    from condensegrpo.core.protocols.task import Split
    from condensegrpo.training.run_setup import PreparedRun

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
    with waiting_for("checking the configuration", quiet=output is not Output.CONSOLE):
        postpone_collections()  # until the run begins
        from condensegrpo.learner.ranks import leave, world_size
        from condensegrpo.training.run_setup import prepare_run

        prepared = prepare_run(config, continued=run, overwrite=overwrite, allow_changes=allow_changes, dry_run=dry_run)
    if dry_run:
        _print_dry_run(prepared, text)
        return
    quiet_libraries()
    with prepared.folder() as folder:
        if launched_rank(os.environ) > 0:
            stop = StopRequest()
            code = 0 if prepared.train(folder, observer=Silent(), stopping=stop.requested) else stop.exit_code
        else:
            code = _train_as_first_rank(prepared, folder, output, debug=debug)
    if world_size() > 1:  # a single process leaves at its exit
        leave()
    raise typer.Exit(code)


def _one_of(options: Mapping[str, bool]) -> None:
    """Check that at most one of these options was given."""
    given = [option for option, is_given in options.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"reading the options: found {given[1]} with {given[0]}. Choose one of them.")


def _configuration(
    arguments: list[str], resume: Path | None, *, continue_: bool
) -> "tuple[RunConfig, RunFolder | None, Callable[[], str]]":
    """The configuration, the run that it continues if there is one, and its text with the origin of each value."""
    from condensegrpo.config.load import dump_with_origins, load_config

    join_launch(os.environ)
    path, overrides = _source(arguments, resume)
    run = RunFolder.open(resume) if resume else None
    config = load_config(path, overrides)
    named = RunFolder(Path(config.runs_dir) / config.name)
    # nothing is trained until every rank has come this far
    return config, named if continue_ and named.trained else run, lambda: dump_with_origins(config, path, overrides)


def _print_dry_run(prepared: "PreparedRun", configuration: "Callable[[], str]") -> None:
    for line in "\n".join(prepared.notes).splitlines():
        typer.echo(f"# {line}")
    for split in SPLITS:
        problems = prepared.components.problems(split)
        count = counted(len(problems), "problem")
        typer.echo(f"# {split}: {count}, the first: {problems[0].question[:80]!r}")
    typer.echo(configuration(), nl=False)


def _source(arguments: list[str], resume: Path | None) -> tuple[Path, list[str]]:
    """The YAML file and the overrides that give the configuration."""
    from condensegrpo.config.load import find_config

    names, overrides = names_and_overrides(arguments)
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


def _train_as_first_rank(prepared: "PreparedRun", folder: RunFolder, output: Output, *, debug: bool) -> int:
    """Train as rank 0, which shows the progress and writes ``log.txt``; returns the exit code, 0 after all steps."""
    steps, lines = prepared.components.config.train.steps, JsonLines()
    with ExitStack() as stack:
        log = stack.enter_context(RunLog(folder.log, steps=steps))
        stack.enter_context(outlived_streams(log.say))
        console = TrainingConsole(steps=steps, debug=debug)
        shown = {Output.QUIET: (), Output.JSON: (lines,), Output.CONSOLE: (console,)}[output]
        if console in shown:
            stack.enter_context(console)
        stop = StopRequest(log.doing, console.announce)
        finished = prepared.train(folder, observer=Observers(log, *shown), stopping=stop.requested)
    if output is Output.JSON:
        lines.emit("end", finished=finished, folder=str(folder.path))
    elif output is Output.CONSOLE and finished:
        print_summary(folder)
    elif output is Output.CONSOLE:
        typer.echo(f"stopped. To continue: condensegrpo train --resume {shlex.quote(str(folder.path))}")
    return 0 if finished else stop.exit_code
