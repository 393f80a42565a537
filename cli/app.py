"""The command ``condensegrpo``: registers the subcommands. Imports nothing heavy, so that --help is fast."""

import sys
import traceback
from typing import Annotated

import typer

import condensegrpo
from condensegrpo.cli.doctor import doctor
from condensegrpo.cli.evaluate import evaluate
from condensegrpo.cli.export import export
from condensegrpo.cli.init import init
from condensegrpo.cli.inspect_trajectory import inspect_trajectory
from condensegrpo.cli.interrupts import end_with_launcher, exit_immediately, handle_first
from condensegrpo.cli.launch_sagemaker import sagemaker
from condensegrpo.cli.launch_slurm import slurm
from condensegrpo.cli.model import fetch
from condensegrpo.cli.options import DEBUG, without_debug
from condensegrpo.cli.plan import plan
from condensegrpo.cli.play import play
from condensegrpo.cli.plugins import plugins
from condensegrpo.cli.proxy import proxy
from condensegrpo.cli.quickstart import quickstart
from condensegrpo.cli.report import report
from condensegrpo.cli.runs import runs
from condensegrpo.cli.serve import serve
from condensegrpo.cli.streams import open_streams, refused_output
from condensegrpo.cli.sweep import sweep
from condensegrpo.cli.train import train
from condensegrpo.core.errors import CondenseError, ConfigError
from condensegrpo.core.plugins import installed


def _algorithms() -> str:
    """The lists of estimators and losses below the help of ``train``."""
    kinds = (("algorithm.advantage.estimator", "estimators"), ("algorithm.loss.name", "losses"))
    lists = (f"[bold]{key}[/bold]: {', '.join(point.name for point in installed(kind))}" for key, kind in kinds)
    return "\n\n".join((*lists, "Formulas and when to use which: docs/reference/estimators.md"))


app = typer.Typer(
    help="Multi-turn GRPO for language-model agents whose context is condensed before every turn.",
    epilog="--debug after any command shows the tracebacks of errors.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"condensegrpo {condensegrpo.__version__}")
        raise typer.Exit


@app.callback()
def _launched(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", hidden=True)] = None,
) -> None:
    """Accept the option that the deepspeed launcher passes to every process; LOCAL_RANK has the same value."""


app.command("quickstart")(quickstart)
app.command("init")(init)
app.command("train", epilog=_algorithms())(train)
app.command("sweep")(sweep)
app.add_typer(runs, name="runs")
app.command("eval")(evaluate)
app.command("play")(play)
app.command("inspect")(inspect_trajectory)
app.command("inspect-trajectory", help="The same as inspect.")(inspect_trajectory)
app.command("report")(report)
app.command("export")(export)
app.command("doctor")(doctor)
app.command("plan")(plan)
app.command("serve")(serve)
app.command("proxy")(proxy)
launch = typer.Typer(
    help="Write scripts that start a run on a cluster or in a cloud, and submit them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
launch.command("slurm")(slurm)
launch.command("sagemaker")(sagemaker)
app.add_typer(launch, name="launch")
app.command("plugins")(plugins)
model = typer.Typer(help="Pretrained models.", no_args_is_help=True, rich_markup_mode="rich")
model.callback()(lambda: None)  # else its only command would be the whole of it
model.command("fetch")(fetch)
app.add_typer(model, name="model")


def main() -> None:
    """Run the command line. Exit code 2: the configuration is wrong; 1: the work failed; 130: Ctrl-C; 143: SIGTERM."""
    open_streams()
    end_with_launcher()
    handle_first(exit_immediately)  # train installs its own handler
    try:
        app(without_debug(sys.argv[1:]))
    except CondenseError as error:
        if DEBUG in sys.argv:
            sys.stderr.write(traceback.format_exc())
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except OSError:
        if (refused := refused_output()) is None:
            raise
        text = f"error: writing to the standard output: {refused.strerror}. Send it elsewhere."
        typer.secho(text, fg="red", err=True)
        sys.exit(1)
