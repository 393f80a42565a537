"""``condensegrpo runs``: the list of runs, and runs compared with each other."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from condensegrpo.cli.options import AsJson, check_plot, run_folders
from condensegrpo.core.errors import ConfigError
from condensegrpo.display import theme
from condensegrpo.display.tables import show_fitting, table
from condensegrpo.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

    from condensegrpo.reporting.runs import RunComparison, RunSummary

STYLES = {"running": theme.HEAD, "finished": theme.GOOD, "failed": theme.BAD, "unreadable": theme.BAD}
CURVES = (  # metric, title, format of a value
    ("eval/success", "held-out success", "{:.3f}"),
    ("success", "success in training", "{:.2f}"),
    ("reward", "reward", "{:.3f}"),
    ("context_tokens", "largest context, tokens", "{:.1f}"),
    ("output_tokens", "output, tokens", "{:.0f}"),
    ("groups_of_equal_reward", "groups without signal", "{:.0%}"),
    ("grad_norm", "gradient norm", "{:.2g}"),
)
UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
MOST_CELLS = 60  # characters of a curve
LONGEST_VALUE = 40  # characters of a setting

runs = typer.Typer(help="List runs and compare them.", rich_markup_mode="rich", invoke_without_command=True)


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
    from condensegrpo.reporting.runs import find_runs, summary

    if not runs_dir.is_dir():
        raise ConfigError(f"listing the runs of {runs_dir}: there is no such folder. Give one with --runs-dir.")
    summaries = sorted((summary(path, runs_dir) for path in find_runs(runs_dir)), key=lambda run: run.age)
    if as_json:
        typer.echo(json.dumps({"version": 1, "runs": [_as_json(run) for run in summaries]}, indent=2))
        return
    console = theme.console()
    if not summaries:
        console.print(f"no runs in {runs_dir}. Start one: condensegrpo train quickstart", soft_wrap=True)
        return
    rows = (
        (
            run.name,
            Text(run.status, STYLES.get(run.status, "")),
            f"{run.step}/{'?' if run.steps is None else run.steps}",
            "–" if run.success is None else f"{run.success:.3f}",
            _age(run.age),
            _size(run.bytes),
        )
        for run in summaries
    )
    show_fitting(console, table("", ("run", "state", "step", "held-out success", "age", "size"), rows, left=2))


@runs.command("compare")
def compare_runs(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders; one shows that run.", autocompletion=run_folders),
    ],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the curves into this file (.svg or .png).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: settings that differ, curves on one scale, evaluations with differences paired by problem.

    Example: condensegrpo runs compare runs/quickstart runs/two-notes
    """
    from condensegrpo.reporting.runs import compare_runs

    check_plot(plot, ".png", ".svg")
    compared = compare_runs([RunFolder.open(path) for path in paths])
    if plot is not None:
        from condensegrpo.reporting.plots import plot_runs

        plot_runs(compared, [(metric, title) for metric, title, _ in CURVES], plot)
    if as_json:
        typer.echo(json.dumps({"version": 1, **asdict(compared)}, indent=2))
        return
    console = theme.console()
    _print_settings(console, compared)
    _print_curves(console, compared)
    _print_evaluations(console, compared)
    if plot is not None:
        console.print(f"plot    {plot}", soft_wrap=True)


def _print_settings(console: "Console", compared: "RunComparison") -> None:
    if len(compared.runs) == 1:
        return
    rows = ([Text(key), *(Text(_short(value)) for value in values)] for key, values in compared.settings.items())
    if compared.settings:
        show_fitting(console, table("", ("setting", *compared.runs), rows, left=1 + len(compared.runs)))
    else:
        console.print("settings: no difference")


def _print_curves(console: "Console", compared: "RunComparison") -> None:
    """The curves of all runs below each other, from the first step of any to the last."""
    from condensegrpo.reporting.runs import sparklines

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


def _print_evaluations(console: "Console", compared: "RunComparison") -> None:
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
                f"{result.metrics['context_tokens']:.1f}" if "context_tokens" in result.metrics else "–",
            )
        )
    heads = ("evaluation", "run", "step", "success [95 %]", "difference [95 %]", "context")
    console.print()
    show_fitting(console, table("", heads, rows, left=2), heads=2)
    counts = sorted({result.pairs for result in compared.evaluations if result.pairs})
    if counts:
        console.print(
            f"difference: to {compared.runs[0]}, paired by problem ({', '.join(map(str, counts))} problems)\n"
            "context: mean of the largest of a trajectory, tokens",
            style=theme.DIM,
            soft_wrap=True,
        )


def _as_json(run: "RunSummary") -> Mapping[str, object]:
    return {**asdict(run), "success": run.success and run.success._asdict()}


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _age(seconds: float) -> str:
    """``5 min``: in the largest unit of which there is one."""
    length, unit = next((each for each in UNITS if seconds >= each[0]), UNITS[-1])
    return f"{seconds / length:.0f} {unit}"


def _size(count: int) -> str:
    """``1.2 GB``."""
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"
