"""``condensegrpo runs``, ``report``, ``export`` and ``export-rows``: what there is of runs, and what leaves them."""

import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich import filesize
from rich.console import Console
from rich.text import Text

from condensegrpo.assembly.policy import run_of_policy
from condensegrpo.cli.options import AsJson, run_folders
from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.core.wording import plural
from condensegrpo.display import theme
from condensegrpo.display.console import waiting_for
from condensegrpo.display.tables import show_fitting, table
from condensegrpo.display.theme import one_line, program
from condensegrpo.integrations.rows import System, export_rows
from condensegrpo.reporting.runs import RunComparison, compare_runs, find_runs, sparklines, summary
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.hub import files_of, upload_to_hub
from condensegrpo.storage.run_folder import RunFolder

STYLES = {"running": theme.HEAD, "finished": theme.GOOD, "failed": theme.BAD, "unreadable": theme.BAD}
CURVES = (  # metric, title, format of a value
    ("eval/success", "held-out success", "{:.3f}"),
    ("success", "success in training", "{:.2f}"),
    ("reward", "reward", "{:.3f}"),
    ("context_tokens", "largest context, tokens", "{:.1f}"),
    ("output_tokens", "output, tokens", "{:.0f}"),
    ("price", "price, in tokens read", "{:.0f}"),
    ("groups_of_equal_reward", "groups without signal", "{:.0%}"),
    ("grad_norm", "gradient norm", "{:.2g}"),
)
SIZES = (("context_tokens", "{:.1f}"), ("price", "{:.0f}"))  # of an evaluation
UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
MOST_CELLS = 60  # characters of a curve
LONGEST_VALUE = 40  # characters of a setting

runs = typer.Typer(rich_markup_mode="rich", invoke_without_command=True)


@runs.callback()
def list_runs(
    context: typer.Context,
    runs_dir: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the runs, with those of sweeps.")] = Path(
        "runs"
    ),
    as_json: AsJson = False,
) -> None:
    """List the runs of a folder: state, steps, held-out success with its 95 % interval, age and size.

    Example: condensegrpo runs --runs-dir runs/s1_summaries
    """
    if context.invoked_subcommand is not None:
        return
    if not runs_dir.is_dir():
        raise ConfigError(f"listing the runs of {runs_dir}: there is no such folder. Give one with --runs-dir.")
    summaries = sorted((summary(path, runs_dir) for path in find_runs(runs_dir)), key=lambda run: run.age)
    if as_json:
        listed = [{**asdict(run), "success": run.success and run.success._asdict()} for run in summaries]
        typer.echo(json.dumps({"version": 1, "runs": listed}, indent=2))
        return
    console = theme.console()
    if not summaries:
        console.print(f"no runs in {runs_dir}. Start one: {program()} train quickstart", soft_wrap=True)
        return
    rows = (
        (
            run.name,
            Text(run.status, STYLES.get(run.status, "")),
            f"{run.step}/{'?' if run.steps is None else run.steps}",
            "–" if run.success is None else f"{run.success:.3f}",
            _age(run.age),
            filesize.decimal(run.bytes),
        )
        for run in summaries
    )
    show_fitting(console, table("", ("run", "state", "step", "held-out success", "age", "size"), rows, left=2))


@runs.command("compare")
def compare_command(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Run folders; one shows that run.", autocompletion=run_folders),
    ],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the curves into this file (.svg or .png).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: settings that differ, curves on one scale, evaluations with differences paired by problem.

    Example: condensegrpo runs compare runs/quickstart runs/two-notes
    """
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise ConfigError(f"reading --plot {plot}: wanted a name that ends in .png or .svg.")
    if plot is not None and not plot.parent.is_dir():
        raise ConfigError(f"reading --plot {plot}: there is no folder {plot.parent}.")
    compared = compare_runs([RunFolder.open(path) for path in paths])
    if plot is not None:
        from condensegrpo.reporting.plots import plot_runs

        plot_runs(compared, [(metric, title) for metric, title, _ in CURVES], plot)
    if as_json:
        typer.echo(json.dumps({"version": 1, **asdict(compared)}, indent=2))
        return
    console = theme.console()
    if len(compared.runs) > 1 and not compared.settings:
        console.print("settings: no difference")
    elif len(compared.runs) > 1:
        settings = (
            [key, *(one_line(json.dumps(value, ensure_ascii=False), LONGEST_VALUE) for value in values)]
            for key, values in compared.settings.items()
        )
        show_fitting(
            console,
            table(
                "",
                ("setting", *compared.runs),
                [[*map(Text, cells)] for cells in settings],
                left=1 + len(compared.runs),
            ),
        )
    _print_curves(console, compared)
    _print_evaluations(console, compared)
    if plot is not None:
        console.print(f"plot    {plot}", soft_wrap=True)


def _print_curves(console: Console, compared: RunComparison) -> None:
    """The curves of all runs below each other, from the first step of any to the last."""
    name_width = min(max(map(len, compared.runs)), console.width // 4)
    cells = max(1, min(MOST_CELLS, console.width - name_width - 24))
    for metric, title, form in CURVES:
        curves = [[(line["step"], line[metric]) for line in lines if metric in line] for lines in compared.metrics]
        if not any(curves):
            continue
        console.print(f"\n{title}", style=theme.HEAD)
        for run, curve, line in zip(compared.runs, curves, sparklines(curves, cells), strict=True):
            ends = " → ".join(form.format(value) for _, value in (*curve[:1], *curve[1:][-1:])) or "not measured"
            console.print(f"  {run[-name_width:]:{name_width}}  {line}  {ends}")


def _print_evaluations(console: Console, compared: RunComparison) -> None:
    rows = []
    for result in compared.evaluations:
        missing = "" if result.run == compared.runs[0] else "not comparable"
        rows.append(
            (
                result.evaluation,
                result.run,
                str(result.step),
                f"{result.success:.3f}",
                missing if result.difference is None else f"{result.difference:+.3f}",
                *(form.format(result.metrics[metric]) if metric in result.metrics else "–" for metric, form in SIZES),
            )
        )
    heads = ("evaluation", "run", "step", "success [95 %]", "difference [95 %]", "context", "price")
    console.print()
    show_fitting(console, table("", heads, rows, left=2), heads=2)
    counts = sorted({result.pairs for result in compared.evaluations if result.pairs})
    if counts:
        console.print(
            f"difference: to {compared.runs[0]}, paired by problem ({', '.join(map(str, counts))} problems)\n"
            "context: mean of the largest of a trajectory, tokens\n"
            "price: mean of all its calls, in tokens read",
            style=theme.DIM,
            soft_wrap=True,
        )


def _age(seconds: float) -> str:
    """A duration in its largest unit: ``5 min``."""
    length, unit = next((each for each in UNITS if seconds >= each[0]), UNITS[-1])
    return f"{seconds / length:.0f} {unit}"


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

        folder = RunFolder.open(run).path
        if output is None and not os.access(folder, os.W_OK):
            raise RunError(
                f"writing the report of {run}: its folder cannot be written. Write it elsewhere: --output FILE."
            )
        page = write_page(folder, file=output)
    typer.echo(page)


def export_command(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run folder, or a step_… folder in its checkpoints.")
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to create.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the run's checkpoint; by default the newest.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The LoRA adapter alone, as a PEFT folder, not merged into its base.")
    ] = False,
    licence: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="Licence of the model card, such as apache-2.0.")
    ] = None,
    repository: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="REPO", help="Also upload to this Hugging Face repository.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --push-to-hub: a new repository is public, not private.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --push-to-hub: write TARGET, list what would be sent, send nothing.")
    ] = False,
) -> None:
    """Write a trained policy as a Hugging Face folder: weights (with LoRA merged), tokenizer, model card, condenser.

    Example: condensegrpo export runs/quickstart exported --step 40
    """
    if repository is None and (public or dry_run):
        raise RunError(
            "exporting: --public and --dry-run say how to upload. Add --push-to-hub REPO, or leave them out."
        )
    with waiting_for("loading torch and transformers") as display:
        from condensegrpo.learner.export import ExportedPart, checkpoint_of, export_checkpoint

        display.phase(f"exporting {source}", None)
        checkpoint = checkpoint_of(source, step)
        part: ExportedPart = "adapter" if adapter else "model"
        run = run_of_policy(str(checkpoint))
        if run is None:
            export_checkpoint(checkpoint, target, part)
            display.notice("no model card: the checkpoint is not in the folder of its run")
        else:
            from condensegrpo.reporting.model_card import write_card

            name = repository or target.absolute().name
            card = partial(write_card, RunFolder(run), part=part, name=name, licence=licence)
            export_checkpoint(checkpoint, target, part, card)
    typer.echo(f"{checkpoint} → {target}")
    if repository is not None:
        _push(target, repository, public=public, dry_run=dry_run)


def _push(folder: Path, repository: str, *, public: bool, dry_run: bool) -> None:
    files = files_of(folder)
    size = f"{plural(len(files), 'file')}, {sum(files.values()) / 1e6:.1f} MB"
    if dry_run:
        visibility = "public" if public else "private"
        typer.echo(f"would upload {size} to {repository} ({visibility} if it is new):")
        typer.echo("".join(f"  {size:>12,}  {name}\n" for name, size in files.items()), nl=False)
        return
    typer.echo(f"uploading {size} to {repository}")
    typer.echo(upload_to_hub(folder, repository, public=public, message=f"condensegrpo export of {folder.name}"))


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
    if out is not None and out.exists():
        raise RunError(f"exporting to {out}: it is there already, and nothing is overwritten. Give a new name.")
    lines = [json.dumps(row) for row in export_rows(source, to, step=step)]
    text = "".join(f"{line}\n" for line in lines)
    if out is None:
        typer.echo(text, nl=False)
        return
    write_atomically(out, text)
    typer.echo(f"{plural(len(lines), 'row')} for {to} → {out}")
