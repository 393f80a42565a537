"""What ``condensegrpo inspect`` prints where there is no terminal: the groups of a step, then a trajectory by turns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from condensegrpo.cli.inspect_choice import Choice
from condensegrpo.core.errors import DataError
from condensegrpo.core.information import changes, description
from condensegrpo.core.wording import counted
from condensegrpo.display import theme
from condensegrpo.display.inspect_tables import group_table, sibling_table
from condensegrpo.display.neutral import neutral, one_line
from condensegrpo.display.trajectory_view import details, heading, overview
from condensegrpo.inspection.batches import TrajectoryBatch
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.opened import TrajectoryReader
from condensegrpo.inspection.panes import TurnView
from condensegrpo.inspection.pictures import media_of
from condensegrpo.inspection.records import Group, IndexedTrajectory, groups
from condensegrpo.storage.codec import dump_line, fields_of
from condensegrpo.storage.trajectories import Provenance

MOST_MATCHES = 20  # rows


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The result of the command; ``--json`` prints it."""

    version: int
    file: str
    step: int | None
    provenance: Provenance | None  # None: an imported log, which has none
    evaluation: bool  # whether the policy was evaluated: nothing is learned from these trajectories
    beside: tuple[str, ...]  # names of the other evaluations of the same policy
    budget: int | None  # of a context, in tokens; None: not known, and bars are drawn against the largest one
    problems: tuple[str, ...]
    groups: tuple[Group, ...]
    matches: tuple[IndexedTrajectory, ...]  # after --group, --where and --sort; the first is shown
    trajectory: IndexedTrajectory
    detail: str
    turns: tuple[TurnView, ...]
    information: tuple[str, ...]  # how condensations changed the information about the answer, a sentence each
    tokenizer: str | None  # file; None: not requested, or none was found


def view_of(
    index: Index,
    batch: TrajectoryBatch,
    every: Sequence[IndexedTrajectory],
    matches: tuple[IndexedTrajectory, ...],
    *,
    tokens: bool,
) -> View:
    """What is printed of a step and of the first of the matching trajectories.

    Raises:
        DataError: the trajectory cannot be read.
    """
    chosen = matches[0]
    reader = TrajectoryReader(index, batch)
    opened = reader.open(chosen, largest=max(record.figures.context_tokens for record in every), tokens=tokens)
    return View(
        version=4,
        file=str(batch.file),
        step=batch.number,
        provenance=batch.provenance,
        evaluation=batch.is_evaluation,
        beside=batch.beside,
        budget=reader.budget,
        problems=batch.problems,
        groups=groups(every),
        matches=tuple(matches),
        trajectory=chosen,
        detail=opened.scored.trajectory.detail,
        turns=opened.turns,
        information=tuple(description(change) for change in changes(opened.scored.trajectory)),
        tokenizer=str(reader.texts.file) if tokens and reader.texts.file else None,
    )


def view_json(view: View, shown: Sequence[TurnView]) -> str:
    """The view as one JSON object, with some of its turns."""
    groups = [fields_of(group) | {"siblings": [each.values for each in group.siblings]} for group in view.groups]
    trajectories = {"matches": [each.values for each in view.matches], "trajectory": view.trajectory.values}
    return dump_line(fields_of(view) | trajectories | {"groups": groups, "turns": shown})


def turns_to_show(view: View, turn: int | None) -> tuple[TurnView, ...]:
    """The turns of which details are printed: the requested one, or all.

    Raises:
        DataError: the trajectory has no such turn.
    """
    every = view.turns
    if turn is not None and turn >= len(every):
        raise DataError(f"looking for turn {turn} of {view.trajectory.id}: it has {len(every)} turns, counted from 0.")
    return every if turn is None else every[turn : turn + 1]


def _listing_parts(view: View, *, condition: str, one_group: bool, width: int) -> Iterator[RenderableType]:
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
    if condition:
        more = f", the first {MOST_MATCHES}" if len(view.matches) > MOST_MATCHES else ""
        title = f"{counted(len(view.matches), 'trajectory', 'trajectories')}{neutral(condition)}{more}"
        yield sibling_table(title, view.matches[:MOST_MATCHES], chosen.id, width)
    elif not one_group:
        yield group_table(view.groups, chosen.figures.group_id, width)
    group = next(group for group in view.groups if group.id == chosen.figures.group_id)
    title = f"group {one_line(group.id, 60)}"
    idle = f": {group.idle}, nothing is learned from it" if group.idle else ""
    yield sibling_table(f"{title}{idle}", group.siblings, chosen.id, width)


def _purpose(view: View) -> str:
    """What the trajectories are for: a training step, or the evaluation of a policy."""
    if not view.evaluation:
        return "" if view.step is None else f"step {view.step} · "
    name = view.provenance.evaluation if view.provenance is not None else None
    steps = "" if view.step is None else f" after {counted(view.step, 'step')} of training"
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
    yield from details(shown, full=full, media=media_of(Path(view.file)))


def parts_of(
    view: View, width: int, *, choice: Choice, shown: Sequence[TurnView], tokens: bool, full: bool
) -> Iterator[RenderableType]:
    """Everything that is printed, with details of the turns that are ``shown``."""
    condition = "".join(
        f" {option} {value}" for option, value in (("where", choice.where), ("by", choice.sort)) if value
    )
    yield from _listing_parts(view, condition=condition, one_group=choice.is_named, width=width)
    yield from _trajectory_parts(view, shown, tokens=tokens, full=full)
