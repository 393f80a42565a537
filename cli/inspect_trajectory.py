"""``condensegrpo inspect-trajectory``: which trajectories there are, and what happened in one of them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from condensegrpo.cli import theme
from condensegrpo.cli.filters import parse_where, sort_key
from condensegrpo.cli.inspect_tables import group_table, sibling_table
from condensegrpo.cli.inspection import (
    Group,
    InspectedStep,
    Sibling,
    TokenTexts,
    TurnView,
    budget_of,
    every_step,
    groups,
    open_step,
    siblings,
    turns,
)
from condensegrpo.cli.neutral import counted, neutral, one_line
from condensegrpo.cli.trajectory_view import details, heading, overview
from condensegrpo.core.errors import DataError
from condensegrpo.metrics.information import changes, description
from condensegrpo.storage.codec import dump_line
from condensegrpo.storage.files import write_atomically

MOST_MATCHES = 20  # rows


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The result of the command; ``--json`` prints it."""

    version: int
    file: str
    step: int | None
    problems: tuple[str, ...]
    groups: tuple[Group, ...]
    matches: tuple[Sibling, ...]  # after --group, --where and --sort; the first is shown
    trajectory: Sibling
    detail: str
    turns: tuple[TurnView, ...]
    information: tuple[str, ...]  # how condensations changed the information about the answer, a sentence each
    tokenizer: str | None  # file; None: not asked for, or none was found


def inspect_trajectory(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_FILE", help="A run folder, or a trajectory file (JSONL).")],
    step: Annotated[int | None, typer.Option(help="Of a run; by default the last.")] = None,
    group: Annotated[str | None, typer.Option(help="Only trajectories of this group.")] = None,
    trajectory: Annotated[str | None, typer.Option(help="Show the trajectory of this id.")] = None,
    where: Annotated[str | None, typer.Option(help="Show those for which this holds: 'score==0 and turns>3'.")] = None,
    sort: Annotated[str | None, typer.Option(help="Show the first by this field; -field: the largest first.")] = None,
    turn: Annotated[int | None, typer.Option(min=0, help="Details of this turn only.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show sampled tokens: advantage, id, text, log-probability.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Show whole contexts and texts.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only verify the invariants, of all steps without --step; exit code 1."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also draw what is shown into this SVG file.")] = None,
) -> None:
    """Show the groups of a step, then one trajectory turn by turn: what was condensed, sampled and trained.

    Example: condensegrpo inspect-trajectory runs/quickstart --where 'correct == 0' --sort -context --tokens
    """
    if check:
        _check(every_step(path, step), as_json=as_json)
        return
    opened = open_step(path, step)
    every = siblings(opened)
    matches = select(every, group=group, trajectory=trajectory, where=where, sort=sort)
    view = _view(opened, every, matches, tokens=tokens)
    shown = _turns_to_show(view, turn)
    if as_json:
        typer.echo(dump_line(replace(view, turns=shown)))
        return
    asked = "".join(f" {option} {value}" for option, value in (("where", where), ("by", sort)) if value)

    def draw(console: Console) -> None:
        for part in (
            *_listing_parts(view, asked=asked, one_group=bool(group or trajectory), width=console.width),
            *_trajectory_parts(view, shown, tokens=tokens, full=full),
        ):
            console.print(part)

    draw(theme.console())
    if svg is not None:
        picture = theme.recorder()
        draw(picture)
        write_atomically(svg, picture.export_svg(title=f"condensegrpo inspect-trajectory {path}"))


def select(
    every: Sequence[Sibling], *, group: str | None, trajectory: str | None, where: str | None, sort: str | None
) -> tuple[Sibling, ...]:
    """The trajectories that match the options, in order. Without options: those of the first group with a signal.

    Raises:
        DataError: none matches.
        ConfigError: --where or --sort cannot be read.
    """
    holds = parse_where(where) if where else lambda _: True
    matches = [
        sibling
        for sibling in every
        if group in (None, sibling.group) and trajectory in (None, sibling.id) and holds(sibling.fields)
    ]
    if not matches:
        raise DataError(_no_match(every, group=group, trajectory=trajectory, where=where))
    if sort:
        key = sort_key(sort)
        return tuple(sorted(matches, key=lambda sibling: key(sibling.fields)))
    if not (group or trajectory or where):
        by_group = groups(matches)
        return next((each for each in by_group if each.signal), by_group[0]).siblings
    return tuple(matches)


def _no_match(every: Sequence[Sibling], *, group: str | None, trajectory: str | None, where: str | None) -> str:
    for kind, name, names in (
        ("group", group, dict.fromkeys(sibling.group for sibling in every)),
        ("trajectory", trajectory, dict.fromkeys(sibling.id for sibling in every)),
    ):
        if name is not None and name not in names:
            more = f" and {len(names) - 12} more" if len(names) > 12 else ""
            return f"looking for {kind} {name!r}: there are {', '.join(list(names)[:12])}{more}."
    return (
        f"looking for trajectories where {where}: none of {len(every)} is left. Try another step or a wider condition."
    )


def _view(opened: InspectedStep, every: Sequence[Sibling], matches: tuple[Sibling, ...], *, tokens: bool) -> View:
    chosen = matches[0]
    scored = next(scored for scored in opened.scored if scored.trajectory.id == chosen.id)
    tokenizer = TokenTexts(opened) if tokens else None
    credit = opened.credit.get(chosen.id) if opened.credit is not None else None
    return View(
        version=2,
        file=str(opened.file),
        step=opened.number,
        problems=opened.problems,
        groups=groups(every),
        matches=matches,
        trajectory=chosen,
        detail=scored.trajectory.detail,
        turns=turns(scored, credit, budget=budget_of(opened), tokenizer=tokenizer),
        information=tuple(description(change) for change in changes(scored.trajectory)),
        tokenizer=str(tokenizer.file) if tokenizer and tokenizer.file else None,
    )


def _turns_to_show(view: View, turn: int | None) -> tuple[TurnView, ...]:
    if turn is None:
        return view.turns
    if turn >= len(view.turns):
        raise DataError(
            f"looking for turn {turn} of {view.trajectory.id}: it has {len(view.turns)} turns, counted from 0."
        )
    return (view.turns[turn],)


def _listing_parts(view: View, *, asked: str, one_group: bool, width: int) -> Iterator[RenderableType]:
    """File and step, the groups or the matches, and the siblings of the chosen trajectory."""
    chosen = view.trajectory
    count = sum(len(group.siblings) for group in view.groups)
    step = f"step {view.step} · " if view.step is not None else ""
    yield Text(f"{one_line(view.file, 120)}   {step}{counted(count, 'trajectory', 'trajectories')}", theme.DIM)
    for problem in view.problems:
        yield Text(f"incomplete: {problem}", theme.WARN)
    yield Text()
    if asked:
        more = f", the first {MOST_MATCHES}" if len(view.matches) > MOST_MATCHES else ""
        title = f"{counted(len(view.matches), 'trajectory', 'trajectories')}{neutral(asked)}{more}"
        yield sibling_table(title, view.matches[:MOST_MATCHES], chosen.id, width)
    elif not one_group:
        yield group_table(view.groups, chosen.group)
    group = next(group for group in view.groups if group.id == chosen.group)
    title = f"group {one_line(group.id, 60)}"
    idle = f": {group.idle}, nothing is learned from it" if group.idle else ""
    yield sibling_table(f"{title}{idle}", group.siblings, chosen.id, width)


def _trajectory_parts(view: View, shown: Sequence[TurnView], *, tokens: bool, full: bool) -> Iterator[RenderableType]:
    """The chosen trajectory at a glance, then turn by turn."""
    yield heading(view.trajectory, view.detail)
    yield Text()
    yield overview(view.turns)
    if view.information:
        yield Text("\n" + "\n".join(view.information))
    if tokens and view.tokenizer is None:
        yield Text("\nno tokenizer.json was found in the run or its model: tokens are shown by id only", theme.WARN)
    yield from details(shown, full=full)


def _check(steps: Sequence[InspectedStep], *, as_json: bool) -> None:
    from condensegrpo.cli.inspect_check import breaches

    by_file = {str(step.file): breaches(step) for step in steps}
    if as_json:
        typer.echo(json.dumps({"version": 1, "breaches": by_file}))
    else:
        screen = theme.console()
        for step in steps:
            breached = by_file[str(step.file)]
            for breach in breached:
                screen.print(Text(f"✗ {neutral(breach)}", theme.BAD))
            turns = sum(len(scored.trajectory.turns) for scored in step.scored)
            trajectories = counted(len(step.scored), "trajectory", "trajectories")
            verdict = counted(len(breached), "breach", "breaches") if breached else "no breach"
            screen.print(Text(f"{step.file}: {trajectories}, {counted(turns, 'turn', 'turns')}, {verdict}"))
    if any(by_file.values()):
        raise typer.Exit(1)
