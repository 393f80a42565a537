"""The command ``condensegrpo``: its subcommands, each imported when it is run, completed or explained.

``condensegrpo --help`` imports no module of a command: it reads the summaries from the source.
"""

import re
import sys
import traceback
from importlib.metadata import EntryPoint
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import condensegrpo
from condensegrpo.cli.options import DEBUG, docstring_in_source, shown, without_debug
from condensegrpo.cli.process import end_with_launcher, exit_immediately, handle_first, open_streams, refused_output
from condensegrpo.core.errors import CondenseError, ConfigError
from condensegrpo.core.packages import missing_package
from condensegrpo.core.plugins import installed

if TYPE_CHECKING:
    from typer._click import Command, Context

COMMANDS = {  # module of ``condensegrpo.cli`` and its function, or its Typer for a group; in the order of the help
    "quickstart": "train:quickstart",
    "init": "init:init",
    "train": "train:train_command",
    "sweep": "sweep:sweep",
    "eval": "evaluate:evaluate_command",
    "play": "evaluate:play",
    "inspect": "inspect:inspect_trajectory",
    "inspect-trajectory": "inspect:inspect_trajectory",
    "report": "runs:report",
    "export": "runs:export_command",
    "export-rows": "runs:export_rows_command",
    "doctor": "doctor:doctor",
    "plan": "configuration:plan_command",
    "config": "configuration:config_command",
    "explain": "configuration:explain",
    "serve": "serve:serve_command",
    "proxy": "serve:proxy",
    "plugins": "init:plugins",
    "runs": "runs:runs",
    "launch": "launch:launch",
    "model": "init:model",
}
GROUPS = {
    "runs": "List runs and compare them.",
    "launch": "Write scripts that start a run on a cluster or in a cloud, and submit them.",
    "model": "Pretrained models.",
}
ALIASES = {"inspect-trajectory"}  # not listed: the summary of the command names it


class LazyGroup(TyperGroup):
    """Knows the commands by their names and summaries, and imports the one that is needed."""

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401  of Typer
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, hidden=name in ALIASES) for name in COMMANDS}

    def get_command(self, ctx: "Context", cmd_name: str) -> "Command | None":
        """The name and the summary of a command."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.help = GROUPS.get(cmd_name) or docstring_in_source(_entry(cmd_name))
            _join_lines(command)
        return command

    def resolve_command(self, ctx: "Context", args: list[str]) -> "tuple[str | None, Command | None, list[str]]":
        """The command that the arguments name, with its options; its module is imported."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, command, rest
        parent = typer.Typer(rich_markup_mode="rich")
        if name in GROUPS:
            parent.add_typer(_entry(name).load(), name=name, help=GROUPS[name])
        else:
            parent.command(name, epilog=_algorithms() if name == "train" else None)(_entry(name).load())
        command = typer.main.get_group(parent).commands[name]
        _join_lines(command)
        return name, command, rest


def _join_lines(command: "Command") -> None:
    """Make each paragraph of the help one line, which the terminal wraps: Typer keeps the line breaks of the source."""
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", cleandoc(command.help or ""))
    for inner in getattr(command, "commands", {}).values():
        _join_lines(inner)


def _entry(name: str) -> EntryPoint:
    return EntryPoint(name, f"condensegrpo.cli.{COMMANDS[name]}", group="")


def _algorithms() -> str:
    """The lists of estimators and losses below the help of ``train``."""
    kinds = (("algorithm.advantage.estimator", "estimators"), ("algorithm.loss.name", "losses"))
    lists = (f"[bold]{key}[/bold]: {', '.join(point.name for point in installed(kind))}" for key, kind in kinds)
    return "\n\n".join((*lists, "Formulas and when to use which: docs/reference/estimators.md"))


app = typer.Typer(
    cls=LazyGroup,
    help="Multi-turn GRPO for language-model agents under context compaction.",
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


def _print_traceback(*error: Any) -> None:  # noqa: ANN401  as ``traceback.format_exception``
    sys.stderr.write(shown("".join(traceback.format_exception(*error))))


def main() -> None:
    """Run the command line. Exit code 2: the configuration is wrong; 1: the work failed; 130: Ctrl-C; 143: SIGTERM."""
    open_streams()
    end_with_launcher()
    handle_first(exit_immediately)  # train installs its own handler
    sys.excepthook = _print_traceback
    try:
        app(without_debug(sys.argv[1:]))
    except (CondenseError, ModuleNotFoundError) as error:
        missing = missing_package(error)
        if missing is None and isinstance(error, ModuleNotFoundError):
            raise
        if DEBUG in sys.argv:
            _print_traceback(type(error), error, error.__traceback__)
        typer.secho(shown(f"error: {f'{missing}.' if missing else error}"), fg="red", err=True)
        sys.exit(2 if missing or isinstance(error, ConfigError) else 1)
    except OSError:
        if (refused := refused_output()) is None:
            raise
        text = f"error: writing to the standard output: {refused.strerror}. Send it elsewhere."
        typer.secho(text, fg="red", err=True)
        sys.exit(1)
