"""``condensegrpo train`` and ``quickstart``: start or resume a training run, show its progress and its summary."""

import os
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from condensegrpo.cli.options import Debug, check_one_of, config_names, names_and_overrides
from condensegrpo.cli.process import StopRequest, outlived_streams
from condensegrpo.config.load import dump_with_origins, find_config, load_config
from condensegrpo.config.resumed import recorded_changes
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.observer import Observer, Observers
from condensegrpo.core.process import postpone_collections
from condensegrpo.core.protocols.task import Split
from condensegrpo.core.wording import plural
from condensegrpo.display.console import TrainingConsole, quiet_libraries, waiting_for
from condensegrpo.display.run_log import JsonLines, RunLog
from condensegrpo.display.tables import table
from condensegrpo.display.theme import EscapingConsole, program
from condensegrpo.evaluation.figures import evaluations_in
from condensegrpo.learner.launchers import join_launch, launched_rank
from condensegrpo.storage.new_run import free_name
from condensegrpo.storage.run_folder import RunFolder, read_metrics

if TYPE_CHECKING:
    from condensegrpo.training.run_setup import PreparedRun

MEASURES = (
    ("success", "success", "{:.3f}"),
    ("largest context, tokens", "context_tokens", "{:.1f}"),
    ("tokens read, all calls", "prompt_tokens", "{:.1f}"),
    ("output, tokens", "output_tokens", "{:.1f}"),
    ("price, in tokens read", "price", "{:.1f}"),
    ("valid format", "format_valid", "{:.3f}"),
    ("successful tool calls", "tool_calls_valid", "{:.3f}"),
)


def train_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|KEY=VALUE",
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
        bool, typer.Option("--overwrite", help="Delete a run of the same name before this one begins.")
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
    if allow_changes and not (resume or continue_):
        raise ConfigError("reading the options: found --allow-changes without --resume. Add --resume RUN.")
    check_one_of({"--resume": resume, "--continue": continue_, "--overwrite": overwrite})
    check_one_of({"--quiet": quiet, "--json": as_json})
    join_launch(os.environ)
    path, overrides = _source(arguments or [], resume)
    config = load_config(path, overrides)
    named = RunFolder(resume or Path(config.runs_dir) / config.name)
    # nothing is trained until every rank has come this far
    run = named if resume or (continue_ and named.has_results) else None
    with waiting_for("checking the configuration", quiet=quiet or as_json):
        postpone_collections()  # until the run begins
        from condensegrpo.learner.ranks import leave, world_size
        from condensegrpo.training.run_setup import prepare_run

        prepared = prepare_run(config, continued=run, overwrite=overwrite, allow_changes=allow_changes, dry_run=dry_run)
    if dry_run:
        _print_dry_run(prepared, dump_with_origins(config, path, overrides))
        return
    quiet_libraries()
    with prepared.folder() as folder:
        if launched_rank(os.environ) > 0:
            stop = StopRequest()
            code = 0 if prepared.train(folder, observer=Observer(), stopping=stop.requested) else stop.exit_code
        else:
            code = _train_as_first_rank(prepared, folder, quiet=quiet, as_json=as_json, debug=debug)
    if world_size() > 1:  # a single process leaves at its exit
        leave()
    raise typer.Exit(code)


def _print_dry_run(prepared: "PreparedRun", configuration: str) -> None:
    for line in "\n".join(prepared.notes).splitlines():
        typer.echo(f"# {line}")
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        problems = prepared.components.problems(split)
        typer.echo(f"# {split}: {plural(len(problems), 'problem')}, the first: {problems[0].question[:80]!r}")
    typer.echo(configuration, nl=False)


def _source(arguments: list[str], resume: Path | None) -> tuple[Path, list[str]]:
    """The YAML file and the overrides that give the configuration."""
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


def _train_as_first_rank(prepared: "PreparedRun", folder: RunFolder, *, quiet: bool, as_json: bool, debug: bool) -> int:
    """Train as rank 0, which shows the progress and writes ``log.txt``; returns the exit code, 0 after all steps."""
    steps, lines = prepared.components.config.train.steps, JsonLines()
    with ExitStack() as stack:
        log = stack.enter_context(RunLog(folder.log, steps=steps))
        stack.enter_context(outlived_streams(log.notice))
        console = TrainingConsole(steps=steps, debug=debug)
        shown = () if quiet else (lines,) if as_json else (stack.enter_context(console),)
        stop = StopRequest(log.doing, console.announce)
        finished = prepared.train(folder, observer=Observers(log, *shown), stopping=stop.requested)
    if as_json:
        lines.emit("end", finished=finished, folder=str(folder.path))
    elif finished and not quiet:
        print_summary(folder)
    elif not quiet:
        typer.echo(f"stopped. To continue: {program()} train --resume {shlex.quote(str(folder.path))}")
    return 0 if finished else stop.exit_code


def quickstart(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of the shipped configuration.")
    ] = None,
) -> None:
    """Train the built-in ledger task offline, in a few minutes of a CPU, into runs/quickstart of this folder.

    If that run exists, the new one is quickstart-2 and so on: no run that was trained is overwritten.

    Example: condensegrpo quickstart train.steps=20
    """
    given = dict(override.partition("=")[::2] for override in overrides or [])
    name = given.get("name") or free_name(Path(given.get("runs_dir", "runs")) / "quickstart")
    train_command(["quickstart", *(overrides or []), f"name={name}"])


def print_summary(folder: RunFolder) -> None:
    """Print the closing summary of a run, from its ``metrics.jsonl`` alone."""
    evaluated = [line for line in read_metrics(folder.metrics) if "eval/success" in line]
    console = EscapingConsole(highlight=False, soft_wrap=True, markup=False)
    if evaluated:
        console.print(_table(evaluated[0] if evaluated[0]["step"] == 0 else None, evaluated[-1]))
    for change in recorded_changes(folder):
        console.print(f"changed     from step {change.first_step} on, {change}")
    path = folder.path
    console.print(f"policy      {path}/checkpoints (newest: a Hugging Face folder in model/)")
    console.print(f"curves      {path}/report.html  {path}/metrics.jsonl")
    console.print(f"next        {program()} inspect {shlex.quote(str(path))}")
    console.print(f"            {program()} eval {shlex.quote(str(path))} --samples 4")


def _table(before: dict[str, float] | None, after: dict[str, float]) -> Table:
    """The evaluations after training, beside those before it if there were any."""
    steps = plural(round(after["step"]), "step")
    shown = {"after": after} if before is None else {"before": before, "after": after}
    title = f"held-out problems, {' → '.join(shown)} {steps}, [95 % interval]"
    drawn = table(title, ("evaluation", "metric", *shown), (), left=2)
    for name, prefix in sorted(evaluations_in(after).items(), key=lambda evaluation: len(evaluation[1])):
        measured = [measure for measure in MEASURES if f"{prefix}/{measure[1]}" in after]
        for row, (label, key, form) in enumerate(measured):
            cells = [_cell(line, f"{prefix}/{key}", form) for line in shown.values()]
            drawn.add_row("" if row else name, label, *cells)
        drawn.add_section()
    return drawn


def _cell(line: dict[str, float], key: str, form: str) -> str:
    """A metric, with its 95 % interval if it has one."""
    if key not in line:
        return "–"
    bounds = [form.format(line[f"{key}{bound}"]) for bound in ("_low", "_high") if f"{key}{bound}" in line]
    return f"{form.format(line[key])} [{', '.join(bounds)}]" if bounds else form.format(line[key])
