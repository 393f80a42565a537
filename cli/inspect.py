"""``condensegrpo inspect``: browse, print or verify the trajectories of a run."""

import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from condensegrpo.algorithms.segments import broken_invariants
from condensegrpo.cli.inspect_selection import Choice, Listing, export_page
from condensegrpo.cli.options import AsJson, check_one_of
from condensegrpo.core.errors import ConfigError, DataError, TrajectoryFileError
from condensegrpo.core.scored_trajectory import ScoredTrajectory, figures_of, information_changes
from condensegrpo.core.wording import plural
from condensegrpo.display import theme
from condensegrpo.display.console import waiting_for
from condensegrpo.display.tables import group_table, sibling_table
from condensegrpo.display.theme import neutral, one_line
from condensegrpo.display.trajectory_view import details, heading, overview
from condensegrpo.inspection import views
from condensegrpo.inspection.batches import choose, credit_of, step_of, trajectory_files
from condensegrpo.inspection.index import Index, TrajectoryBatch
from condensegrpo.inspection.pictures import media_of
from condensegrpo.inspection.records import groups
from condensegrpo.storage.codec import dump_line, fields_of
from condensegrpo.storage.files import write_atomically
from condensegrpo.storage.trajectories import Credit, read_trajectories

EACH = "Run the command once for each."
MOST_WORSE = 20  # problems that are printed
VIEW_NAMES = ", ".join((*(view.name for view in views.READY_VIEWS), views.GOT_WORSE))
MOST_MATCHES = 20  # rows


def inspect_trajectory(
    path: Annotated[
        Path, typer.Argument(metavar="RUN_OR_FILE", help="A run folder, a folder of eval --save, or a trajectory file.")
    ],
    trajectory_id: Annotated[str | None, typer.Argument(metavar="ID", help="As --trajectory.")] = None,
    step: Annotated[int | None, typer.Option(help="Of a run; by default that of the id, or the last.")] = None,
    evaluation: Annotated[
        str | None, typer.Option(metavar="NAME", help="This evaluation, such as held-out, not the training batch.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="Only trajectories of this group: 6/12, or 12.")] = None,
    trajectory: Annotated[
        str | None, typer.Option(help="Show the trajectory of this id, 6/12/3, or number: 99 or '#99'.")
    ] = None,
    view: Annotated[list[str] | None, typer.Option(metavar="NAME", help=f"Show a ready view: {VIEW_NAMES}.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help="Show those for which this holds: 'score==0 and turns>3'. Repeat: all."),
    ] = None,
    sort: Annotated[str | None, typer.Option(help="Show the first by this field; -field: the largest first.")] = None,
    turn: Annotated[int | None, typer.Option(min=0, help="Details of this turn only.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show sampled tokens: advantage, id, text, log-probability.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Show whole contexts and texts.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only verify the invariants, of all steps without --step; exit code 1.")
    ] = False,
    as_json: AsJson = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print, also on a terminal.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one offline page, of the step or of what --view and --where match."),
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw what is printed into a picture.")] = None,
) -> None:
    """Browse a run's trajectories: what was condensed, sampled and trained, and why. Press ? for the keys.
    Alias: inspect-trajectory.

    Where there is no terminal, or with --plain, --tokens, --full, --json or --svg: print a step, then one
    trajectory.

    Example: condensegrpo inspect runs/quickstart --where 'correct == 0' --sort -context --tokens
    """
    if trajectory is not None and trajectory_id is not None:
        raise ConfigError(f"reading the arguments: found the trajectory {trajectory_id} and --trajectory {trajectory}.")
    printing = {"--turn": turn is not None, "--tokens": tokens, "--full": full, "--svg": svg}
    choosing = {"--group": group, "--trajectory": trajectory or trajectory_id, "--view": view, "--where": where}
    if check:
        check_one_of({"--check": check, **choosing, "--sort": sort, **printing, "--html": html}, EACH)
        files = trajectory_files(path) if path.is_dir() and step is None and evaluation is None else ()
        print_breaches(files or (choose(path, step, evaluation),), as_json=as_json)
        return
    for output, endings in ((html, (".html", ".htm")), (svg, (".svg",))):
        if output is not None and output.suffix not in endings:
            raise ConfigError(
                f"writing {output}: wanted a name that ends in .html, for a page, or .svg, for a picture."
            )
    if view is not None and len(view) > 1:
        raise ConfigError(f"reading --view: found {' and '.join(view)}, wanted one view. Add a condition by --where.")
    named = view[0] if view else None
    conditions = where or []
    condition = conditions[0] if len(conditions) == 1 else " and ".join(f"({text})" for text in conditions) or None
    choice = Choice(group=group, trajectory=trajectory or trajectory_id, where=condition, sort=sort)
    if step is None and (path / "config.yaml").is_file():
        step = step_of(choice.trajectory, group)
    file = choose(path, step, evaluation)
    index = Index(path)
    is_worse = named == views.GOT_WORSE
    ready = views.ready_view(named) if named is not None and not is_worse else None
    printed = plain or tokens or full or as_json or svg is not None
    if is_worse:
        others = {"--where": where, "--sort": sort, "--json": as_json, "--html": html, "--svg": svg}
        check_one_of(
            {f"--view {named}": True, **others}, "It lists problems. Choose one: --where \"problem == 'NAME'\"."
        )
    if html is not None:
        check_one_of({"--html": html, "--json": as_json, "--sort": sort, **printing}, EACH)
        is_single = path.is_file() or choice.is_named or step is not None or evaluation is not None
        export_page(html, index, file if is_single else None, choice.within(ready))
    elif sys.stdin.isatty() and sys.stdout.isatty() and not printed:
        from condensegrpo.cli.inspect_app import run

        one_file = file if path.is_file() or step is not None or evaluation is not None else None
        run(index, file, choice, turn=turn or 0, first="worse" if is_worse else _listing(choice, ready, one_file))
    elif is_worse:
        _print_worse(index)
    else:
        _print(index, file, choice.within(ready), turn=turn, tokens=tokens, full=full, as_json=as_json, svg=svg)


def _listing(choice: Choice, ready: views.ReadyView | None, file: Path | None) -> Listing | None:
    """The matches that the application lists first; None: no view, condition or order is given."""
    given = (("--view", ready and ready.name), ("--where", choice.where), ("--sort", choice.sort))
    shown = [(option, value) for option, value in given if value]
    meant = choice.within(ready)
    matching = ", ".join(part for part in (ready and ready.title, choice.where) if part)
    title = " by ".join(part for part in (matching, choice.sort) if part)
    options = tuple(part for pair in shown for part in pair)
    return Listing(title, meant.where, meant.sort, options, file) if shown else None


def _print_worse(index: Index) -> None:
    """Print the problems that got worse."""
    with waiting_for("reading the trajectories"):
        index.update()
    changes = views.got_worse(index)
    screen = theme.console()
    screen.print(f"{plural(len(changes), 'problem')} got worse: first half of the steps → last half")
    for change in changes[:MOST_WORSE]:
        visits, last = f"{change.evaluation or 'training'}, {len(change.visits)} times", change.visits[-1]
        worst = last.batch.at(last.worst)
        options = f" --evaluation {shlex.quote(change.evaluation)}" if change.evaluation else ""
        example = f"  now, for example, {one_line(worst.id, 60)}{options}"
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
    with waiting_for(f"reading {file}"):
        batch = index.batch(file)
    view = PrintedView(batch, choice, turn=turn, tokens=tokens)
    parts = partial(view.parts, full=full)
    if svg is not None:
        picture = theme.recorder()
        theme.show(picture, parts)
        write_atomically(svg, theme.svg(picture, title=f"condensegrpo inspect {index.path}"))
    if as_json:
        typer.echo(view.json())
        return
    theme.show(theme.console(), parts)


class PrintedView:
    """The trajectories of a file, and the first that is chosen with what is printed of it."""

    def __init__(self, batch: TrajectoryBatch, choice: Choice, *, turn: int | None, tokens: bool) -> None:
        """Read it.

        Args:
            turn: the only one of which details are printed; None: all are.
            tokens: whether its sampled tokens are printed.
        """
        every = batch.records()
        self.batch, self.choice, self.tokens = batch, choice, tokens
        self.groups, self.matches = groups(every), choice.of(every)  # matches: after --group, --where and --sort
        self.record = self.matches[0]
        self.opened = batch.open(self.record, tokens=tokens)
        turns = self.opened.turns
        if turn is not None and turn >= len(turns):
            raise DataError(f"looking for turn {turn} of {self.record.id}: it has {len(turns)} turns, counted from 0.")
        self.shown = turns if turn is None else turns[turn : turn + 1]
        # a sentence for each condensation that changed the information about the answer
        self.information = [change.description for change in information_changes(self.opened.scored.trajectory)]

    def json(self) -> str:
        """All as one JSON object."""
        return dump_line(
            {
                "version": 5,
                "file": self.batch.file,
                "step": self.batch.number,
                "provenance": self.batch.provenance,  # null: it was not given
                "evaluation": self.batch.is_evaluation,
                "beside": self.batch.beside,
                "budget": self.batch.budget,  # of a context, in tokens; null: not known
                "groups": [
                    fields_of(each) | {"siblings": [one.values for one in each.siblings]} for each in self.groups
                ],
                "matches": [each.values for each in self.matches],
                "trajectory": self.record.values,
                "detail": self.opened.scored.trajectory.detail,
                "turns": self.shown,
                "information": self.information,
                "tokenizer": self.batch.texts.file if self.tokens else None,  # null: not requested, or none was found
            }
        )

    def parts(self, width: int, *, full: bool) -> Iterator[RenderableType]:
        """Everything that is printed: the file, groups or matches, siblings, and the trajectory."""
        group = next(group for group in self.groups if group.id == self.record.figures.group_id)
        yield from self._about()
        yield Text()
        named = (("where", self.choice.where), ("by", self.choice.sort))
        if conditions := "".join(f" {option} {value}" for option, value in named if value):
            more = f", the first {MOST_MATCHES}" if len(self.matches) > MOST_MATCHES else ""
            title = f"{plural(len(self.matches), 'trajectory', 'trajectories')}{neutral(conditions)}{more}"
            yield sibling_table(title, self.matches[:MOST_MATCHES], self.record.id, width)
        elif not self.choice.is_named:
            yield group_table(self.groups, group.id, width)
        idle = f": {group.exclusion}, nothing is learned from it" if group.exclusion else ""
        yield sibling_table(f"group {one_line(group.id, 60)}{idle}", group.siblings, self.record.id, width)
        yield Text()
        detail, credit = self.opened.scored.trajectory.detail, group.credit_sentence(self.record)
        yield heading(self.record, detail, credit=credit, full=full)
        yield Text()
        yield overview(self.opened.turns)
        if self.information:
            yield Text("\n" + "\n".join(self.information))
        if self.tokens and self.batch.texts.file is None:
            yield Text("\nno tokenizer.json was found in the run or its model: tokens are shown by id only", theme.WARN)
        yield from details(self.shown, full=full, media=media_of(self.batch.file))

    def _about(self) -> Iterator[RenderableType]:
        """The purpose of the file, and how its trajectories were sampled."""
        batch, known = self.batch, self.batch.provenance
        trajectories = plural(sum(len(group.siblings) for group in self.groups), "trajectory", "trajectories")
        yield Text(f"{_purpose(batch)}{trajectories}   {one_line(str(batch.file), 120)}", theme.DIM)
        if known is not None:
            how = (
                *([f"model {one_line(known.model, 80)}"] if known.evaluation is not None else []),
                f"condenser {one_line(known.condenser, 40)}",
                f"contexts of at most {known.max_context_tokens} tokens",
                "greedy" if known.temperature == 0 else f"temperature {known.temperature:g}",
                f"seed {known.seed}",
            )
            yield theme.Flow((Text(part, theme.DIM) for part in how), gap=" · ", indent=2)
        if batch.beside:
            yield Text(f"beside it: {one_line(', '.join(batch.beside), 120)} (--evaluation NAME)", theme.DIM)
        if self.batch.budget is None:
            yield Text("the context budget is not known: bars are drawn against the largest context", theme.DIM)


def _purpose(batch: TrajectoryBatch) -> str:
    """The purpose of the trajectories: a training step, or the evaluation of a policy."""
    if not batch.is_evaluation:
        return "" if batch.number is None else f"step {batch.number} · "
    name = batch.provenance.evaluation if batch.provenance is not None else None
    steps = "" if batch.number is None else f" after {plural(batch.number, 'step')} of training"
    return f"evaluation{f' {one_line(name, 60)}' if name else ''}{steps} · "


def print_breaches(files: Sequence[Path], *, as_json: bool) -> None:
    """Print the breaches of trajectory files and their credit; exit with code 1 if there is one."""
    read: dict[str, Sequence[ScoredTrajectory]] = {str(file): () for file in files}
    by_file: dict[str, tuple[str, ...]] = {}
    for file in files:
        try:
            read[str(file)] = read_trajectories(file)
            by_file[str(file)] = breaches(read[str(file)], credit_of(file))
        except TrajectoryFileError as error:
            by_file[str(file)] = (str(error),)
    if as_json:
        typer.echo(json.dumps({"version": 1, "breaches": by_file}))
    else:
        screen = theme.console()
        for name, breached in by_file.items():
            for breach in breached:
                screen.print(Text(f"✗ {neutral(breach)}", theme.BAD), soft_wrap=True)
            scored = read[name]
            trajectories = plural(len(scored), "trajectory", "trajectories")
            turns = plural(sum(len(each.trajectory.turns) for each in scored), "turn")
            verdict = plural(len(breached), "breach", "breaches") if breached else "no breach"
            screen.print(f"{name}: {trajectories}, {turns}, {verdict}", soft_wrap=True)
    if any(by_file.values()):
        raise typer.Exit(1)


def breaches(read: Sequence[ScoredTrajectory], credit: Mapping[str, Credit] | None) -> tuple[str, ...]:
    """The breaches of invariants in the trajectories of a step and their credit, if it has any."""
    broken: list[str] = []
    for scored in read:
        broken += [
            f"{scored.trajectory.id}: {breach}"
            for breach in (*broken_invariants(scored.trajectory), *_of_score(scored))
        ]
    broken += _of_groups(read)
    broken += _of_credit(read, credit) if credit is not None else ()
    return tuple(broken)


def _of_score(scored: ScoredTrajectory) -> Iterator[str]:
    """Compare score and figures with the trajectory; reading has checked that the score is finite."""
    largest = scored.trajectory.max_context_tokens
    if scored.score.context_tokens != largest:
        yield f"the score counts {scored.score.context_tokens} context tokens, its largest prompt has {largest}"
    if not 0 <= scored.score.correct <= 1:
        yield f"correct is {scored.score.correct}, wanted a number from 0 to 1"
    stored, computed = map(fields_of, (scored.figures, figures_of(scored.trajectory, scored.score)))
    for name, value in computed.items():
        if stored[name] != value:
            yield f"its figures have {name} {stored[name]}, its trajectory and score have {value}"


def _of_groups(trajectories: Sequence[ScoredTrajectory]) -> Iterator[str]:
    problems: dict[str, str] = {}
    ids: set[str] = set()
    for scored in trajectories:
        group, problem = scored.trajectory.group_id, scored.trajectory.problem_id
        if problems.setdefault(group, problem) != problem:
            yield f"group {group} holds problem {problems[group]} and, in {scored.trajectory.id}, problem {problem}"
        if scored.trajectory.id in ids:
            yield f"{scored.trajectory.id} is in the file twice"
        ids.add(scored.trajectory.id)


def _of_credit(trajectories: Sequence[ScoredTrajectory], given: Mapping[str, Credit]) -> Iterator[str]:
    turns = {scored.trajectory.id: len(scored.trajectory.turns) for scored in trajectories}
    yield from (f"{name} has no credit" for name in turns if name not in given)
    for name, credit in given.items():
        if name not in turns:
            yield f"the credit of {name} belongs to no trajectory of the file"
            continue
        if len(credit.advantages) != turns[name]:
            yield f"{name}: it has {turns[name]} turns and credit for {len(credit.advantages)}"
        for index, (advantage, weight) in enumerate(zip(credit.advantages, credit.weights, strict=True)):
            if not math.isfinite(advantage):
                yield f"{name}: the advantage of turn {index} is {advantage}"
            if not (math.isfinite(weight) and weight >= 0):
                yield f"{name}: the token weight of turn {index} is {weight}, wanted a finite number of at least 0"
