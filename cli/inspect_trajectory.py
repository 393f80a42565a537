"""``condensegrpo inspect``: which trajectories there are, and what happened in one of them."""

import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from condensegrpo.cli.inspect_choice import Choice, check_output, one_view
from condensegrpo.cli.inspect_print import parts_of, turns_to_show, view_json, view_of
from condensegrpo.cli.options import AsJson
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.wording import counted
from condensegrpo.display import theme
from condensegrpo.display.console import waiting_for
from condensegrpo.display.theme import neutral, one_line
from condensegrpo.inspection import views
from condensegrpo.inspection.batches import choose, step_of, trajectory_files
from condensegrpo.inspection.index import Index
from condensegrpo.storage.files import write_atomically

if TYPE_CHECKING:
    from condensegrpo.cli.inspect_app.selection import Listing

MOST_WORSE = 20  # problems that are printed
RunOrFile = Annotated[
    Path, typer.Argument(metavar="RUN_OR_FILE", help="A run folder, a folder of eval --save, or a trajectory file.")
]
Identity = Annotated[str | None, typer.Argument(metavar="[ID]", help="As --trajectory.")]
Step = Annotated[int | None, typer.Option(help="Of a run; by default that of the id, or the last.")]
Evaluation = Annotated[
    str | None, typer.Option(metavar="NAME", help="This evaluation, such as held-out, not the training batch.")
]
GroupName = Annotated[str | None, typer.Option(help="Only trajectories of this group: 6/12, or 12.")]
TrajectoryName = Annotated[
    str | None, typer.Option(help="Show the trajectory of this id, 6/12/3, or number: 99 or '#99'.")
]
ViewNames = ", ".join((*(view.name for view in views.READY_VIEWS), views.GOT_WORSE))
View = Annotated[list[str] | None, typer.Option(metavar="NAME", help=f"Show a ready view: {ViewNames}.")]
Where = Annotated[
    list[str] | None,
    typer.Option(metavar="CONDITION", help="Show those for which this holds: 'score==0 and turns>3'. Repeat: all."),
]
Sort = Annotated[str | None, typer.Option(help="Show the first by this field; -field: the largest first.")]
TurnNumber = Annotated[int | None, typer.Option(min=0, help="Details of this turn only.")]
Tokens = Annotated[bool, typer.Option("--tokens", help="Show sampled tokens: advantage, id, text, log-probability.")]
Full = Annotated[bool, typer.Option("--full", help="Show whole contexts and texts.")]
Check = Annotated[
    bool, typer.Option("--check", help="Only verify the invariants, of all steps without --step; exit code 1.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Print, also on a terminal.")]
Page = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write one offline page, of the step or of what --view and --where match."),
]
Picture = Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw what is printed into a picture.")]


def inspect_trajectory(
    path: RunOrFile,
    trajectory_id: Identity = None,
    step: Step = None,
    evaluation: Evaluation = None,
    group: GroupName = None,
    trajectory: TrajectoryName = None,
    view: View = None,
    where: Where = None,
    sort: Sort = None,
    turn: TurnNumber = None,
    tokens: Tokens = False,
    full: Full = False,
    check: Check = False,
    as_json: AsJson = False,
    plain: Plain = False,
    html: Page = None,
    svg: Picture = None,
) -> None:
    """Browse a run's trajectories: what was condensed, sampled and trained, and why. Press ? for the keys.

    Where there is no terminal, or with --plain, --tokens, --full, --json or --svg: print a step, then one
    trajectory.

    Example: condensegrpo inspect runs/quickstart --where 'correct == 0' --sort -context --tokens
    """
    if trajectory is not None and trajectory_id is not None:
        raise ConfigError(f"reading the arguments: found the trajectory {trajectory_id} and --trajectory {trajectory}.")
    printing = {"--turn": turn is not None, "--tokens": tokens, "--full": full, "--svg": svg}
    choosing = {"--group": group, "--trajectory": trajectory or trajectory_id, "--view": view, "--where": where}
    if check:
        _alone("--check", {**choosing, "--sort": sort, **printing, "--html": html})
        from condensegrpo.cli.inspect_check import print_breaches

        every_file = path.is_dir() and step is None and evaluation is None
        files = trajectory_files(path) if every_file else ()
        print_breaches(files or (choose(path, step, evaluation),), as_json=as_json)
        return
    check_output(html, svg)
    conditions = where or []
    condition = conditions[0] if len(conditions) == 1 else " and ".join(f"({text})" for text in conditions) or None
    named = one_view(view or [])
    choice = Choice(group=group, trajectory=trajectory or trajectory_id, where=condition, sort=sort)
    if step is None and (path / "config.yaml").is_file():
        step = step_of(choice.trajectory, group)
    file = choose(path, step, evaluation)
    index = Index(path)  # writes a file, so not into a folder without trajectories
    is_worse = named == views.GOT_WORSE
    ready = views.ready_view(named) if named is not None and not is_worse else None
    printed = plain or tokens or full or as_json or svg is not None
    if is_worse and (condition or sort or as_json or html or svg):
        raise ConfigError(
            f"reading --view {named}: it lists problems, without --where, --sort, --json, --html and --svg. Choose "
            "a problem: --where \"problem == 'NAME'\"."
        )
    if html is not None:
        _alone("--html", {"--json": as_json, "--sort": sort, **printing})
        from condensegrpo.cli.inspect_html import export

        is_single = path.is_file() or choice.is_named or step is not None or evaluation is not None
        export(html, index, file if is_single else None, choice.within(ready))
    elif sys.stdin.isatty() and sys.stdout.isatty() and not printed:
        from condensegrpo.cli.inspect_app.app import run

        one_file = file if path.is_file() or step is not None or evaluation is not None else None
        run(index, file, choice, turn=turn or 0, first="worse" if is_worse else _listing(choice, ready, one_file))
    elif is_worse:
        _print_worse(index)
    else:
        _print(index, file, choice.within(ready), turn=turn, tokens=tokens, full=full, as_json=as_json, svg=svg)


def _alone(option: str, given: Mapping[str, object]) -> None:
    """Check that no option is given that another leaves out.

    Raises:
        ConfigError: one is; the message names them.
    """
    if others := [name for name, value in given.items() if value]:
        raise ConfigError(f"reading {option}: it goes without {', '.join(others)}. Run the command once for each.")


def _listing(choice: Choice, ready: views.ReadyView | None, file: Path | None) -> "Listing | None":
    """The matches that the application lists first; None: no view, condition or order is given."""
    from condensegrpo.cli.inspect_app.selection import Listing

    given = (("--view", ready and ready.name), ("--where", choice.where), ("--sort", choice.sort))
    shown = [(option, value) for option, value in given if value]
    meant = choice.within(ready)
    matching = ", ".join(part for part in (ready and ready.title, choice.where) if part)
    title = " by ".join(part for part in (matching, choice.sort) if part)
    options = tuple(part for pair in shown for part in pair)
    return Listing(title, meant.where, meant.sort, options, file) if shown else None


def _print_worse(index: Index) -> None:
    """Print the problems that got worse."""
    with waiting_for("indexing the trajectories"):
        index.update()
    changes = views.got_worse(index)
    screen = theme.console()
    screen.print(f"{counted(len(changes), 'problem')} got worse: first half of the steps → last half")
    for change in changes[:MOST_WORSE]:
        visits, last = f"{change.evaluation or 'training'}, {len(change.visits)} times", change.visits[-1]
        worst = index.at(last.batch, last.worst)
        options = f" --evaluation {shlex.quote(change.evaluation)}" if change.evaluation else ""
        example = f"  now, for example, {one_line(worst.id, 60)}{options}" if worst is not None else ""
        screen.print(
            Text(f"{change.before:.2f} → {change.after:.2f}  {visits}  {one_line(change.problem, 60)}{example}")
        )


def _print(
    index: Index,
    file: Path,
    choice: Choice,
    *,
    turn: int | None,
    tokens: bool,
    full: bool,
    as_json: bool,
    svg: Path | None,
) -> None:
    """Print the groups of a step and the first of the chosen trajectories."""
    with waiting_for(f"indexing {file}"):
        index.update([file])
    view = view_of(index, index.batch(file), choice, tokens=tokens)
    shown = turns_to_show(view, turn)
    parts = partial(parts_of, view, choice=choice, shown=shown, tokens=tokens, full=full)
    if svg is not None:
        picture = theme.recorder()
        theme.show(picture, parts)
        write_atomically(svg, theme.svg(picture, title=f"condensegrpo inspect {index.path}"))
    if as_json:
        typer.echo(view_json(view, shown, tokens=tokens))
        return
    screen = theme.console()
    if index.note:
        screen.print(Text(neutral(index.note), theme.DIM), soft_wrap=True)
    theme.show(screen, parts)
