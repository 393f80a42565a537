"""The trajectories that ``condensegrpo inspect`` shows: chosen by options, moved by keys, written as a page.

It knows nothing of the screen: what may take long can run in a thread.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import typer
from rich.text import Text

from condensegrpo.core.errors import DataError
from condensegrpo.core.wording import plural, ranges
from condensegrpo.display.console import waiting_for
from condensegrpo.display.inspector import LONGEST_PROBLEM, SPARKS, change_row, group_row, match_row, sparkline
from condensegrpo.display.theme import as_typed, one_line
from condensegrpo.inspection import views
from condensegrpo.inspection.batches import is_training, trajectory_files
from condensegrpo.inspection.index import Index, OpenedTrajectory, TrajectoryBatch
from condensegrpo.inspection.inspector_page import write_inspector
from condensegrpo.inspection.records import Group, IndexedTrajectory, groups
from condensegrpo.inspection.samples import spread

PAGE = 300  # groups that are listed at a time
WORST = 200  # problems that are listed
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


class Listing(NamedTuple):
    """A condition whose matches are listed."""

    title: str
    where: str | None
    sort: str | None
    options: tuple[str, ...]  # of the command that lists them
    file: Path | None = None  # only of this file; None: of all
    first: IndexedTrajectory | None = None  # is shown first; None: the first match


class Listed(NamedTuple):
    """Trajectories of any steps, with their rows."""

    title: str
    records: Sequence[IndexedTrajectory]
    rows: Sequence[Text]
    listing: Listing | None = None  # the condition that they match, if it was one


@dataclass(slots=True)
class Selection:
    """The part of a run that is shown, moved by the keys."""

    index: Index
    file: Path
    record: InitVar[IndexedTrajectory | None] = None  # is opened first; None: the first of a group with a signal
    batch: TrajectoryBatch = field(init=False)
    groups: list[Group] = field(init=False)  # of the batch, as many as are listed
    opened: OpenedTrajectory = field(init=False)
    group: Group = field(init=False)  # of the trajectory that is opened
    turn: int = 0

    def __post_init__(self, record: IndexedTrajectory | None) -> None:
        self.go_to(self.file)
        self._open(record or self.first)

    @property
    def first(self) -> IndexedTrajectory:
        """The first trajectory of a group with a signal, or of any."""
        return next((group for group in self.groups if group.signal), self.groups[0]).siblings[0]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the kind that is shown: training batches, or the evaluations of its name."""
        every = trajectory_files(self.index.path)
        if is_training(self.file) or len(every) < 2:
            return tuple(file for file in every if is_training(file)) or every
        return tuple(file for file in every if not is_training(file) and file.name == self.file.name)

    def go_to(self, file: Path) -> None:
        """Show the first groups of a batch."""
        self.batch, self.file = self.index.batch(file), file
        self.groups = list(self.batch.groups(0, PAGE))

    def more_groups(self) -> bool:
        """List the next groups of a large batch; False: there are no more."""
        added = self.batch.groups(len(self.groups), PAGE)
        self.groups += added
        return bool(added)

    def step(self, by: int) -> Path | None:
        """The file of another step; None: there is none."""
        files = self.files
        number = files.index(self.file) + by if self.file in files else len(files) - 1
        return files[number] if 0 <= number < len(files) else None

    def other_kind(self) -> Path | None:
        """From training to the evaluations, through their names, and back: of the same step; None: no other kind."""
        kinds: dict[str, list[Path]] = {}
        for file in trajectory_files(self.index.path):
            kinds.setdefault("" if is_training(file) else file.name, []).append(file)
        if len(kinds) < 2:
            return None
        names, number = [*kinds], self.batch.number
        same = kinds[names[(names.index("" if is_training(self.file) else self.file.name) + 1) % len(names)]]
        step = "no step" if number is None else f"{number:06d}"
        return ([file for file in same if step in str(file.relative_to(self.index.path))] or same)[-1]

    def show(self, record: IndexedTrajectory, turn: int = 0) -> OpenedTrajectory:
        """Open a trajectory at a turn."""
        if self.opened.record != record:
            self._open(record)
        self.turn = max(0, min(turn, len(self.opened.turns) - 1))
        return self.opened

    def _open(self, record: IndexedTrajectory) -> None:
        self.opened, self.group = self.read(record), self.index.batch(record.file).group(record)

    def read(self, record: IndexedTrajectory) -> OpenedTrajectory:
        """Read a trajectory, without showing it."""
        return self.index.batch(record.file).open(record)

    @property
    def siblings(self) -> tuple[IndexedTrajectory, ...]:
        """The group from the trajectory that is shown on, around the end."""
        siblings = self.group.siblings
        shown = [each.id for each in siblings].index(self.opened.record.id)
        return siblings[shown:] + siblings[:shown]

    def command(self, listing: Listing | None) -> str:
        """The command that shows this again, beside the matches of a listing."""
        options = listing.options if listing is not None else ()
        shown = ("--trajectory", self.opened.record.id, "--turn", str(self.turn))
        return as_typed(shlex.join((*self.opened.batch.command(self.index.path), *shown, *options)))


def matching(index: Index, listing: Listing, so_far: str) -> Listed:
    """The trajectories for which a condition holds; ``so_far`` follows their number while the run is read."""
    batch = None if listing.file is None else index.batch(listing.file)
    matches = views.find(index, batch, where=listing.where, sort=listing.sort)
    more = f", the first {views.MOST:,}" if matches.total > views.MOST else ""
    title = f"{listing.title}: {matches.total:,}{more}{so_far}"
    if not matches.total:
        title += f". No trajectory has {listing.where}; the open one stays"
    return Listed(title, matches.records, [match_row(record) for record in matches.records], listing)


def worse(index: Index, so_far: str) -> Listed:
    """The problems that got worse, each by its least correct trajectory of the last visit."""
    changes = views.got_worse(index)
    last = [(change, change.visits[-1]) for change in changes[:WORST]]
    listed = [(change, visit.batch.at(visit.worst)) for change, visit in last]
    title = f"{plural(len(changes), 'problem')} got worse: first half of the steps → last half{so_far}"
    return Listed(title, [record for _, record in listed], [change_row(*pair) for pair in listed])


def visits(index: Index, problem: str) -> Listed:
    """The groups of a problem in all steps."""
    followed = index.follow(problem)
    line = sparkline([group.success for _, group in followed], SPARKS)
    drawn = [group_row(group, f"{batch.evaluation or 'step'} {batch.number}") for batch, group in followed]
    return Listed(f"{one_line(problem, LONGEST_PROBLEM)} {line}", [group.siblings[0] for _, group in followed], drawn)


def hits(query: str, found: Sequence[views.Hit], more: str) -> Listed:
    """The hits of a search; ``more`` follows their number."""
    drawn = [
        match_row(hit.record, hit.excerpt if hit.turn is None else f"turn {hit.turn}: {hit.excerpt}") for hit in found
    ]
    most = "+" if len(found) == views.MOST else ""  # where a search stops
    return Listed(f"{query!r}: {len(found):,}{most}{more}", [hit.record for hit in found], drawn)


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


def write_selection(selection: Selection, listed: Sequence[IndexedTrajectory] | None) -> str:
    """Write the page of what is listed and of the open group, as far as a browser opens it at once.

    Args:
        selection: what the application shows.
        listed: trajectories of any steps; None: those of the batch.

    Returns:
        The name and extent of the page, and the address at which it opens here.
    """
    opened, index = selection.opened, selection.index
    every = [*(index.batch(selection.file).records() if listed is None else listed)]
    if _size([(selection.batch, every)]) > COMFORTABLE:
        every = []
    chosen: dict[Path, dict[int, IndexedTrajectory]] = {}
    for record in (*every, *selection.group.siblings):
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
        records = batch.records()
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
