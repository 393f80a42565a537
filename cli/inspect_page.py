"""The trajectories that options choose, and the page of ``--html`` and of the key x: its trajectories and its size."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import typer

from condensegrpo.core.errors import DataError
from condensegrpo.core.wording import plural, ranges
from condensegrpo.display.console import waiting_for
from condensegrpo.inspection import views
from condensegrpo.inspection.batches import TrajectoryBatch, trajectory_files
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.inspector_page import write_inspector
from condensegrpo.inspection.records import IndexedTrajectory, groups
from condensegrpo.inspection.samples import spread

if TYPE_CHECKING:
    from condensegrpo.cli.inspect_app.selection import Selection

MEGABYTE = 10**6
COMFORTABLE, LARGEST = 30 * MEGABYTE, 200 * MEGABYTE  # of a page, roughly
TEXT, SAMPLED = 5, 30  # bytes of a token of a prompt, and of a sampled one with its id and log-probability
ALONE, TURN, PIECE = 800, 1000, 30  # bytes of a trajectory, of a turn, and of a turn in the history of another
FEW = 8  # training steps of a page that is still too large: from here on, groups are left out

Batches = Sequence[tuple[TrajectoryBatch, Sequence[IndexedTrajectory]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Options that select trajectories; None: not given."""

    group: str | None = None  # 6/12, or 12
    trajectory: str | None = None  # 6/12/3, 12/3, or its number in order, 99 or #99
    where: str | None = None
    sort: str | None = None

    @property
    def given(self) -> bool:
        """True if any option was given."""
        return any((self.group, self.trajectory, self.where, self.sort))

    @property
    def is_named(self) -> bool:
        """True if a group or a trajectory is named."""
        return bool(self.group or self.trajectory)

    def within(self, view: views.ReadyView | None) -> "Choice":
        """The same among the trajectories of a ready view, in its order unless ``sort`` is given."""
        if view is None:
            return self
        where = f"({view.where}) and ({self.where})" if self.where else view.where
        return Choice(group=self.group, trajectory=self.trajectory, where=where, sort=self.sort or view.sort)

    def of(self, every: Sequence[IndexedTrajectory]) -> tuple[IndexedTrajectory, ...]:
        """The trajectories that match, in order. Without options: the first group with a signal."""
        matches = views.select(self.named(every), where=self.where, sort=self.sort, most=len(every)).records
        if not matches:
            raise DataError(
                f"looking for trajectories where {self.where}: none of {len(every)} is left. Try another step or a "
                f"wider condition; on a terminal, or with --html FILE, all steps are searched."
                if self.where
                else f"looking for trajectory {self.trajectory} in group {self.group}: it is in another group. Leave "
                f"--group out."
            )
        if not self.given:
            by_group = groups(matches)
            return next((group for group in by_group if group.signal), by_group[0]).siblings
        return matches

    def named(self, every: Sequence[IndexedTrajectory]) -> list[IndexedTrajectory]:
        """The trajectories of the named group or id; all if none is named."""
        group = _meant("group", self.group, [record.figures.group_id for record in every])
        named = _meant("trajectory", self.trajectory, [record.id for record in every])
        return [record for record in every if group in (None, record.figures.group_id) and named in (None, record.id)]


def _meant(kind: str, given: str | None, every: Sequence[str]) -> str | None:
    """The id that is given whole, by its end (12/3 for 6/12/3), or by its number in order (3 or #3), from 0."""
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


def export_page(file: Path, index: Index, single: Path | None, choice: Choice) -> None:
    """Write the page of one trajectory file, or of all files of the run, and print its extent."""
    files = tuple(trajectory_files(index.path)) if single is None else (single,)
    with waiting_for("reading the trajectories"):
        chosen = chosen_batches(index, files, choice)
    write_html(file, index, chosen, limited=single is not None or choice.where is not None)


def write_html(
    file: Path,
    index: Index,
    chosen: Batches,
    *,
    limited: bool,
    comfortable: int = COMFORTABLE,
    largest: int = LARGEST,
) -> None:
    """Write the page of some trajectories and print its extent.

    Args:
        chosen: batches, each with its chosen trajectories; there may be none.
        limited: whether the reader chose them; else only as many steps are taken as are comfortable.
        comfortable: bytes that a browser opens at once.
        largest: bytes that a browser opens at all.
    """
    matching = [(batch, records) for batch, records in chosen if records]
    if not matching:
        raise DataError(f"writing {file}: no trajectory is left. Try another step or a wider condition.")
    taken, groups = (matching, None) if limited else _fitting(matching, comfortable)
    if _size(taken) > largest:
        raise DataError(
            f"writing {file}: {_count(taken)} trajectories of {_size(taken) // MEGABYTE} MB are more than a browser "
            f"opens, at most {largest // MEGABYTE} MB. Take fewer with --step, --group, --view or --where."
        )
    extent = _extent(taken, [batch for batch, _ in chosen])
    if groups is not None:
        extent += f"; at most the first {plural(groups, 'group')} of each"
    size = write_inspector(file, index, taken, extent)
    typer.echo(f"{file}: {extent}, {size / MEGABYTE:.1f} MB")
    if _count(taken) < _count(matching):
        typer.echo("spread over the run; --step, --view or --where takes all that they select")
    if size > 2 * comfortable:
        typer.echo("a browser opens a page of this size slowly; --step, --group, --view or --where makes it smaller")


def _fitting(chosen: Batches, comfortable: int) -> tuple[Batches, int | None]:
    """The steps that are comfortable, and, if few are still too many, the number of groups of each; None: all."""
    most = max(len(_groups(records)) for _, records in chosen)
    taken, steps, groups = chosen, len(chosen), most
    while _size(taken) > comfortable and groups > 1:
        steps, groups = (steps // 2, groups) if steps > FEW else (steps, groups // 2)
        taken = []
        for batch, records in _spread(chosen, steps):
            kept = {*_groups(records)[:groups]}  # of evaluations of one name, the same problems
            taken.append((batch, [record for record in records if record.figures.group_id in kept]))
    return taken, groups if groups < most else None


def _groups(records: Sequence[IndexedTrajectory]) -> list[str]:
    return list(dict.fromkeys(record.figures.group_id for record in records))


def _spread(chosen: Batches, most: int) -> Batches:
    """About ``most`` training steps, and as many evaluations of each name: the first and the last among them."""
    names = {batch.evaluation for batch, _ in chosen}
    by_name = ([batch.file for batch, _ in chosen if batch.evaluation == name] for name in names)
    kept = {file for files in by_name for file in spread(files, most)}
    return [(batch, records) for batch, records in chosen if batch.file in kept]


def _extent(taken: Batches, every: Sequence[TrajectoryBatch]) -> str:
    """The number of trajectories, and their steps: ``8 of 24 trajectories: steps 1–2; held-out after 2``."""
    of = sum(batch.trajectories for batch in every)
    numbers: dict[str | None, list[int]] = {}
    for batch, _ in taken:
        numbers.setdefault(batch.evaluation, []).extend([] if batch.number is None else [batch.number])
    which = "; ".join(filter(None, (_named_steps(*each) for each in numbers.items())))
    return f"{_count(taken):,} of {of:,} trajectories{f': {which}' if which else ''}"


def _named_steps(evaluation: str | None, steps: Sequence[int]) -> str:
    if not steps:
        return evaluation or ""
    numbers = f"{'step' if len(steps) == 1 else 'steps'} {ranges(steps)}"
    return numbers if evaluation is None else f"{evaluation} after {numbers}"


def write_selection(selection: "Selection", listed: Sequence[IndexedTrajectory] | None) -> str:
    """Write the page of what is listed and of the open group, as far as a browser opens it at once.

    Args:
        selection: what the application shows.
        listed: trajectories of any steps; None: those of the batch.

    Returns:
        The name and extent of the page, and the address at which it opens here; empty if nothing is open.
    """
    opened, group, index = selection.opened, selection.group, selection.index
    if opened is None or group is None:
        return ""
    every = [*(index.records(selection.batch) if listed is None else listed)]
    if _size([(selection.batch, every)]) > COMFORTABLE:
        every = []
    chosen: dict[Path, dict[int, IndexedTrajectory]] = {}
    for record in (*every, *group.siblings):
        chosen.setdefault(record.file, {})[record.number] = record
    name = re.sub(r"[^\w.-]+", "-", opened.record.id)
    page = Path(f"inspect-{index.path.resolve().stem}-{name}.html")
    batches = [(batch, [*chosen[batch.file].values()]) for batch in index.batches() if batch.file in chosen]
    extent = _extent(batches, index.batches())
    size = write_inspector(page, index, batches, extent)
    shown = {
        "step": opened.batch.number,
        "evaluation": opened.batch.evaluation,
        "t": opened.record.id,
        "turn": selection.turn,
    }
    address = urlencode({key: value for key, value in shown.items() if value is not None}, safe="/")
    return f"{page.absolute()}: {extent}, {size / MEGABYTE:.1f} MB. With #{address} after its address it opens here."


def chosen_batches(index: Index, files: Sequence[Path], choice: Choice) -> Batches:
    """The batches of some files with their chosen trajectories, of named ones the whole groups; there may be none."""
    index.update(files)
    chosen = []
    several = (batch for batch in index.batches() if batch.file in files)  # without those that hold nothing yet
    for batch in several if len(files) > 1 else map(index.batch, files):
        records = tuple(index.records(batch))
        groups = {record.figures.group_id for record in choice.named(records)}
        meant = [record for record in records if record.figures.group_id in groups]
        chosen.append((batch, views.select(meant, where=choice.where, most=len(records)).records))
    return chosen


def _size(chosen: Batches) -> int:
    """Bytes of a page, roughly: texts, sampled tokens, and for every turn its credit and the history before it."""
    every = [record.figures for _, records in chosen for record in records]
    texts = sum(TEXT * each.prompt_tokens_uncached + SAMPLED * each.output_tokens for each in every)
    return texts + sum(ALONE + TURN * each.turns + PIECE * each.turns**2 for each in every)


def _count(chosen: Batches) -> int:
    return sum(len(records) for _, records in chosen)
