"""``condensegrpo inspect``: which trajectories there are, and what happened in one of them."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from condensegrpo.cli import theme
from condensegrpo.cli.inspect_tables import group_table, sibling_table
from condensegrpo.cli.neutral import neutral, one_line
from condensegrpo.cli.trajectory_view import details, heading, overview
from condensegrpo.core.errors import DataError
from condensegrpo.core.wording import counted
from condensegrpo.inspection import views
from condensegrpo.inspection.batches import (
    ReadBatch,
    TrajectoryBatch,
    budget_of,
    choose,
    read_batch,
    step_of,
    trajectory_files,
)
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.panes import TokenTexts, TurnView, turns
from condensegrpo.inspection.records import Group, TrajectoryRecord, groups
from condensegrpo.metrics.information import changes, description
from condensegrpo.storage.codec import dump_line
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.trajectories import Provenance

MOST_MATCHES = 20  # rows


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The result of the command; ``--json`` prints it."""

    version: int
    file: str
    step: int | None
    provenance: Provenance | None  # None: of an older file
    evaluation: bool  # whether the policy was evaluated: nothing is learned from these trajectories
    beside: tuple[str, ...]  # names of the other evaluations of the same policy
    budget: int | None  # of a context, in tokens; None: not known, and bars are drawn against the largest one
    problems: tuple[str, ...]
    groups: tuple[Group, ...]
    matches: tuple[TrajectoryRecord, ...]  # after --group, --where and --sort; the first is shown
    trajectory: TrajectoryRecord
    detail: str
    turns: tuple[TurnView, ...]
    information: tuple[str, ...]  # how condensations changed the information about the answer, a sentence each
    tokenizer: str | None  # file; None: not asked for, or none was found


def inspect_trajectory(
    path: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_FILE", help="A run folder, a folder of eval --save, or a trajectory file."),
    ],
    trajectory_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="As --trajectory.")] = None,
    step: Annotated[int | None, typer.Option(help="Of a run; by default that of the id, or the last.")] = None,
    evaluation: Annotated[
        str | None, typer.Option(metavar="NAME", help="This evaluation, such as held-out, not the training batch.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="Only trajectories of this group: 6/12, or 12.")] = None,
    trajectory: Annotated[
        str | None, typer.Option(help="Show the trajectory of this id, 6/12/3, or number: 99 or '#99'.")
    ] = None,
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
    view: Annotated[
        str | None, typer.Option(help=f"A ready view: {', '.join(each.name for each in views.READY_VIEWS)}.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print, also on a terminal.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write one offline page: of the step or what --view and --where match.")
    ] = None,
) -> None:
    """Browse a run's trajectories: what was condensed, sampled and trained, and why. Press ? for the keys.

    Where there is no terminal, or with --plain, --tokens, --full, --json or --svg: print the groups of a step, then one
    trajectory turn by turn.

    Example: condensegrpo inspect runs/quickstart --where 'correct == 0' --sort -context --tokens
    """
    if check:
        every_file = path.is_dir() and step is None and evaluation is None
        files = trajectory_files(path) if every_file else ()
        _check([read_batch(file) for file in files or (choose(path, step, evaluation),)], as_json=as_json)
        return
    trajectory = trajectory or trajectory_id
    if step is None and (path / "config.yaml").is_file():
        step = step_of(trajectory, group)
    index, file = Index(path), choose(path, step, evaluation)
    ready = views.ready_view(view) if view is not None else None
    if sys.stdin.isatty() and sys.stdout.isatty() and not (plain or tokens or full or as_json or svg or html):
        from condensegrpo.cli.inspect_app.app import run

        chosen = partial(select, group=group, trajectory=trajectory, where=where, sort=sort)
        run(index, file, chosen if group or trajectory or where or sort else None, turn=turn or 0, view=ready)
        return
    if ready is not None:
        where, sort = f"({ready.where}) and ({where})" if where else ready.where, sort or ready.sort
    if html is not None:
        from condensegrpo.cli.inspect_html import export

        single = path.is_file() or any(option is not None for option in (step, evaluation, group, trajectory))
        only = partial(select, group=group, trajectory=trajectory, where=None, sort=None)
        export(html, index, file if single else None, where=where, only=only if group or trajectory else None)
        return
    index.update([file])
    batch = index.batch(file)
    every = tuple(index.records(batch))
    matches = select(every, group=group, trajectory=trajectory, where=where, sort=sort)
    result = _view(index, batch, every, matches, tokens=tokens)
    result = replace(result, turns=_turns_to_show(result, turn))
    if as_json:
        typer.echo(dump_line(result))
        return
    asked = "".join(f" {option} {value}" for option, value in (("where", where), ("by", sort)) if value)
    parts = partial(_parts, result, asked=asked, one_group=bool(group or trajectory), tokens=tokens, full=full)
    theme.show(theme.console(), parts)
    if svg is not None:
        picture = theme.recorder()
        theme.show(picture, parts)
        write_atomically(svg, theme.svg(picture, title=f"condensegrpo inspect {path}"))


def _parts(
    view: View, width: int, *, asked: str, one_group: bool, tokens: bool, full: bool
) -> Iterator[RenderableType]:
    """Everything that is printed."""
    yield from _listing_parts(view, asked=asked, one_group=one_group, width=width)
    yield from _trajectory_parts(view, view.turns, tokens=tokens, full=full)


def select(
    every: Sequence[TrajectoryRecord], *, group: str | None, trajectory: str | None, where: str | None, sort: str | None
) -> tuple[TrajectoryRecord, ...]:
    """The trajectories that match the options, in order. Without options: those of the first group with a signal.

    Raises:
        DataError: none matches.
        ConfigError: --where or --sort cannot be read.
    """
    in_group = _meant("group", group, [record.group for record in every])
    named = _meant("trajectory", trajectory, [record.id for record in every])
    meant = [record for record in every if in_group in (None, record.group) and named in (None, record.id)]
    matches = views.select(meant, where=where, sort=sort, most=len(every)).records
    if not matches:
        raise DataError(
            f"looking for trajectories where {where}: none of {len(every)} is left. Try another step or a wider "
            f"condition."
            if where
            else f"looking for trajectory {named} in group {in_group}: it is in another group. Leave --group out."
        )
    if not (sort or group or trajectory or where):
        by_group = groups(matches)
        return next((each for each in by_group if each.signal), by_group[0]).siblings
    return matches


def _meant(kind: str, given: str | None, every: Sequence[str]) -> str | None:
    """The id that is meant by itself, by its end (12/3 for 6/12/3), or by its number in order (3 or #3), from 0.

    Raises:
        DataError: none is meant.
    """
    ids = list(dict.fromkeys(every))
    if given is None or given in ids:
        return given
    number = given.removeprefix("#")
    ends = [name for name in ids if name.endswith(f"/{number}")]
    if number.isdecimal() and (kind == "trajectory" or not ends):  # 12 is also the group 6/12
        ends = ids[int(number) :][:1]
    if not ends:
        more = f" and {len(ids) - 12} more" if len(ids) > 12 else ""
        raise DataError(f"looking for {kind} {given!r}: there are {', '.join(ids[:12])}{more}.")
    return ends[0]


def _view(
    index: Index,
    batch: TrajectoryBatch,
    every: Sequence[TrajectoryRecord],
    matches: tuple[TrajectoryRecord, ...],
    *,
    tokens: bool,
) -> View:
    chosen = matches[0]
    scored = index.read(chosen)
    tokenizer = TokenTexts(batch) if tokens else None
    budget, largest = budget_of(batch), max(record.context for record in every)
    return View(
        version=4,
        file=str(batch.file),
        step=batch.number,
        provenance=batch.provenance,
        evaluation=batch.is_evaluation,
        beside=batch.beside,
        budget=budget,
        problems=batch.problems,
        groups=groups(every),
        matches=tuple(matches),
        trajectory=chosen,
        detail=scored.trajectory.detail,
        turns=turns(
            scored,
            chosen.credit,
            budget=largest if budget is None else budget,
            tokenizer=tokenizer,
            version_known=batch.version_known,
        ),
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
    trajectories = counted(count, "trajectory", "trajectories")
    yield Text(f"{_purpose(view)}{trajectories}   {one_line(view.file, 120)}", theme.DIM)
    if view.provenance is not None:
        yield Text(_sampled_with(view.provenance), theme.DIM)
    if view.beside:
        yield Text(f"beside it: {one_line(', '.join(view.beside), 120)} (--evaluation NAME)", theme.DIM)
    if view.budget is None:
        yield Text("the context budget is not known: bars are drawn against the largest context", theme.DIM)
    for problem in view.problems:
        yield Text(f"incomplete: {problem}", theme.WARN)
    yield Text()
    if asked:
        more = f", the first {MOST_MATCHES}" if len(view.matches) > MOST_MATCHES else ""
        title = f"{counted(len(view.matches), 'trajectory', 'trajectories')}{neutral(asked)}{more}"
        yield sibling_table(title, view.matches[:MOST_MATCHES], chosen.id, width)
    elif not one_group:
        yield group_table(view.groups, chosen.group, width)
    group = next(group for group in view.groups if group.id == chosen.group)
    title = f"group {one_line(group.id, 60)}"
    idle = f": {group.idle}, nothing is learned from it" if group.idle else ""
    yield sibling_table(f"{title}{idle}", group.siblings, chosen.id, width)


def _purpose(view: View) -> str:
    """What the trajectories are for: a training step, or the evaluation of a policy."""
    if not view.evaluation:
        return "" if view.step is None else f"step {view.step} · "
    name = view.provenance.evaluation if view.provenance is not None else None
    steps = "" if view.step is None else f" after {counted(view.step, 'step', 'steps')} of training"
    return f"evaluation{f' {one_line(name, 60)}' if name else ''}{steps} · "


def _sampled_with(known: Provenance) -> str:
    how = "greedy" if known.temperature == 0 else f"temperature {known.temperature:g}"
    model = f"model {one_line(known.model, 80)} · " if known.evaluation is not None else ""
    return (
        f"{model}condenser {one_line(known.condenser, 40)} · contexts of at most {known.max_context_tokens} tokens · "
        f"{how} · seed {known.seed}"
    )


def _trajectory_parts(view: View, shown: Sequence[TurnView], *, tokens: bool, full: bool) -> Iterator[RenderableType]:
    """The chosen trajectory at a glance, then turn by turn."""
    yield heading(view.trajectory, view.detail, full=full)
    yield Text()
    yield overview(view.turns)
    if view.information:
        yield Text("\n" + "\n".join(view.information))
    if tokens and view.tokenizer is None:
        yield Text("\nno tokenizer.json was found in the run or its model: tokens are shown by id only", theme.WARN)
    yield from details(shown, full=full)


def _check(steps: Sequence[ReadBatch], *, as_json: bool) -> None:
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
