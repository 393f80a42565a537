"""What ``condensegrpo inspect`` prints where there is no terminal: the groups of a step, then a trajectory by turns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from condensegrpo.cli.inspect_choice import Choice
from condensegrpo.core.errors import DataError
from condensegrpo.core.scored_trajectory import changes, description
from condensegrpo.core.wording import counted
from condensegrpo.display import theme
from condensegrpo.display.tables import group_table, sibling_table
from condensegrpo.display.theme import neutral, one_line
from condensegrpo.display.trajectory_view import details, heading, overview
from condensegrpo.inspection.batches import TrajectoryBatch
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.opened import OpenedTrajectory, TrajectoryReader
from condensegrpo.inspection.panes import TurnView
from condensegrpo.inspection.pictures import media_of
from condensegrpo.inspection.records import Group, IndexedTrajectory, groups
from condensegrpo.storage.codec import dump_line, fields_of
from condensegrpo.storage.trajectories import Provenance

MOST_MATCHES = 20  # rows


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The trajectories of a file, and one of them with all that is shown of it."""

    groups: tuple[Group, ...]
    matches: tuple[IndexedTrajectory, ...]  # after --group, --where and --sort
    opened: OpenedTrajectory  # the first match

    @property
    def information(self) -> tuple[str, ...]:
        """How condensations changed the information about the answer, a sentence each."""
        return tuple(map(description, changes(self.opened.scored.trajectory)))


def view_of(index: Index, batch: TrajectoryBatch, choice: Choice, *, tokens: bool) -> View:
    """What is printed of a step and of the first of the chosen trajectories; with ``tokens`` those that it sampled.

    Raises:
        DataError: none matches, or it cannot be read.
        ConfigError: the condition or the order cannot be read.
    """
    every = tuple(index.records(batch))
    matches = choice.of(every)
    largest = max(record.figures.context_tokens for record in every)
    opened = TrajectoryReader(index, batch).open(matches[0], largest=largest, tokens=tokens)
    return View(groups=groups(every), matches=matches, opened=opened)


def view_json(view: View, shown: Sequence[TurnView], *, tokens: bool) -> str:
    """The view as one JSON object, with some of its turns."""
    opened, batch = view.opened, view.opened.batch
    return dump_line(
        {
            "version": 4,
            "file": batch.file,
            "step": batch.number,
            "provenance": batch.provenance,  # null: an imported log, which has none
            "evaluation": batch.is_evaluation,
            "beside": batch.beside,
            "budget": opened.reader.budget,  # of a context, in tokens; null: not known
            "problems": batch.problems,
            "groups": [fields_of(each) | {"siblings": [one.values for one in each.siblings]} for each in view.groups],
            "matches": [each.values for each in view.matches],
            "trajectory": opened.record.values,
            "detail": opened.scored.trajectory.detail,
            "turns": shown,
            "information": view.information,
            "tokenizer": opened.reader.texts.file if tokens else None,  # null: not requested, or none was found
        }
    )


def turns_to_show(view: View, turn: int | None) -> tuple[TurnView, ...]:
    """The turns of which details are printed: the requested one, or all.

    Raises:
        DataError: the trajectory has no such turn.
    """
    every = view.opened.turns
    if turn is not None and turn >= len(every):
        name = view.opened.record.id
        raise DataError(f"looking for turn {turn} of {name}: it has {len(every)} turns, counted from 0.")
    return every if turn is None else every[turn : turn + 1]


def parts_of(
    view: View, width: int, *, choice: Choice, shown: Sequence[TurnView], tokens: bool, full: bool
) -> Iterator[RenderableType]:
    """Everything that is printed, with details of the turns that are ``shown``."""
    yield from _listing_parts(view, choice, width)
    yield Text()
    yield heading(view.opened.record, view.opened.scored.trajectory.detail, full=full)
    yield Text()
    yield overview(view.opened.turns)
    if view.information:
        yield Text("\n" + "\n".join(view.information))
    if tokens and view.opened.reader.texts.file is None:
        yield Text("\nno tokenizer.json was found in the run or its model: tokens are shown by id only", theme.WARN)
    yield from details(shown, full=full, media=media_of(view.opened.batch.file))


def _listing_parts(view: View, choice: Choice, width: int) -> Iterator[RenderableType]:
    """File and step, the groups or the matches, and the siblings of the chosen trajectory."""
    batch, chosen = view.opened.batch, view.opened.record
    trajectories = counted(sum(len(group.siblings) for group in view.groups), "trajectory", "trajectories")
    yield Text(f"{_purpose(batch)}{trajectories}   {one_line(str(batch.file), 120)}", theme.DIM)
    if batch.provenance is not None:
        yield Text(_sampled_with(batch.provenance), theme.DIM)
    if batch.beside:
        yield Text(f"beside it: {one_line(', '.join(batch.beside), 120)} (--evaluation NAME)", theme.DIM)
    if view.opened.reader.budget is None:
        yield Text("the context budget is not known: bars are drawn against the largest context", theme.DIM)
    for problem in batch.problems:
        yield Text(f"incomplete: {problem}", theme.WARN)
    yield Text()
    conditions = [f" {option} {value}" for option, value in (("where", choice.where), ("by", choice.sort)) if value]
    if conditions:
        more = f", the first {MOST_MATCHES}" if len(view.matches) > MOST_MATCHES else ""
        title = f"{counted(len(view.matches), 'trajectory', 'trajectories')}{neutral(''.join(conditions))}{more}"
        yield sibling_table(title, view.matches[:MOST_MATCHES], chosen.id, width)
    elif not choice.is_named:
        yield group_table(view.groups, chosen.figures.group_id, width)
    group = next(group for group in view.groups if group.id == chosen.figures.group_id)
    title = f"group {one_line(group.id, 60)}"
    idle = f": {group.idle}, nothing is learned from it" if group.idle else ""
    yield sibling_table(f"{title}{idle}", group.siblings, chosen.id, width)


def _purpose(batch: TrajectoryBatch) -> str:
    """What the trajectories are for: a training step, or the evaluation of a policy."""
    if not batch.is_evaluation:
        return "" if batch.number is None else f"step {batch.number} · "
    name = batch.provenance.evaluation if batch.provenance is not None else None
    steps = "" if batch.number is None else f" after {counted(batch.number, 'step')} of training"
    return f"evaluation{f' {one_line(name, 60)}' if name else ''}{steps} · "


def _sampled_with(known: Provenance) -> str:
    how = "greedy" if known.temperature == 0 else f"temperature {known.temperature:g}"
    model = f"model {one_line(known.model, 80)} · " if known.evaluation is not None else ""
    return (
        f"{model}condenser {one_line(known.condenser, 40)} · contexts of at most {known.max_context_tokens} tokens · "
        f"{how} · seed {known.seed}"
    )
