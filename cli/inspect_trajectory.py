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
from condensegrpo.cli.inspect_tables import group_table, match_table, sibling_table
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


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that one call shows; ``--json`` prints it."""

    version: int
    file: str
    step: int | None
    problems: tuple[str, ...]
    groups: tuple[Group, ...]
    matches: tuple[Sibling, ...]  # those that --group, --where and --sort leave, in order; the first is shown
    trajectory: Sibling
    detail: str
    turns: tuple[TurnView, ...]
    information: tuple[str, ...]  # what condensations did to what contexts know of the answer, a sentence each
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
    """The trajectories that the options leave, in their order. Without any: those of the first group with a signal.

    Raises:
        DataError: they leave none.
        ConfigError: --where or --sort cannot be read.
    """
    holds = parse_where(where) if where else None
    found = [
        one
        for one in every
        if group in (None, one.group) and trajectory in (None, one.id) and (holds is None or holds(one.fields))
    ]
    if not found:
        raise DataError(_none_left(every, group=group, trajectory=trajectory, where=where))
    if sort:
        key = sort_key(sort)
        return tuple(sorted(found, key=lambda one: key(one.fields)))
    if not (group or trajectory or where):
        together = groups(found)
        return next((one for one in together if one.signal), together[0]).siblings
    return tuple(found)


def _none_left(every: Sequence[Sibling], *, group: str | None, trajectory: str | None, where: str | None) -> str:
    if group is not None and all(one.group != group for one in every):
        return f"looking for group {group!r}: there are {_listing([one.group for one in every])}."
    if trajectory is not None and all(one.id != trajectory for one in every):
        return f"looking for trajectory {trajectory!r}: there are {_listing([one.id for one in every])}."
    return (
        f"looking for trajectories where {where}: none of {len(every)} is left. Try another step or a wider condition."
    )


def _listing(names: Sequence[str]) -> str:
    different = list(dict.fromkeys(names))
    return ", ".join(different[:12]) + (f" and {len(different) - 12} more" if len(different) > 12 else "")


def _view(opened: InspectedStep, every: Sequence[Sibling], matches: tuple[Sibling, ...], *, tokens: bool) -> View:
    chosen = matches[0]
    one = next(one for one in opened.scored if one.trajectory.id == chosen.id)
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
        detail=one.trajectory.detail,
        turns=turns(one, credit, budget=budget_of(opened), tokenizer=tokenizer),
        information=tuple(description(change) for change in changes(one.trajectory)),
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
    """Where we are, the groups or what was asked for, and the siblings of the chosen trajectory."""
    chosen = view.trajectory
    count = sum(len(group.siblings) for group in view.groups)
    step = f"step {view.step} · " if view.step is not None else ""
    yield Text(f"{one_line(view.file, 120)}   {step}{counted(count, 'trajectory', 'trajectories')}", theme.DIM)
    for problem in view.problems:
        yield Text(f"incomplete: {problem}", theme.WARN)
    yield Text()
    if asked:
        yield match_table(view.matches, neutral(asked), chosen.id, width)
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

    found = {str(step.file): breaches(step) for step in steps}
    if as_json:
        typer.echo(json.dumps({"version": 1, "breaches": found}))
    else:
        screen = theme.console()
        for step in steps:
            for breach in found[str(step.file)]:
                screen.print(Text(f"✗ {neutral(breach)}", theme.BAD))
            screen.print(Text(f"{step.file}: {_verdict(step, len(found[str(step.file)]))}"))
    if any(found.values()):
        raise typer.Exit(1)


def _verdict(step: InspectedStep, breached: int) -> str:
    turns = sum(len(one.trajectory.turns) for one in step.scored)
    trajectories = counted(len(step.scored), "trajectory", "trajectories")
    verdict = counted(breached, "breach", "breaches") if breached else "no breach"
    return f"{trajectories}, {counted(turns, 'turn', 'turns')}, {verdict}"
