"""The state of the application: a batch, a group, a trajectory and a turn. Knows nothing of the screen."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from condensegrpo.core.errors import CondenseError
from condensegrpo.display.theme import as_typed, neutral
from condensegrpo.inspection.batches import TrajectoryBatch, command_of, is_training, trajectory_files
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.opened import OpenedTrajectory, TrajectoryReader
from condensegrpo.inspection.records import Group, IndexedTrajectory

PAGE = 300  # groups that are listed at a time


class Listing(NamedTuple):
    """A condition whose matches are listed."""

    title: str
    where: str | None
    sort: str | None
    options: tuple[str, ...]  # of the command that lists them
    file: Path | None = None  # only of this file; None: of all
    first: IndexedTrajectory | None = None  # is shown first; None: the first match


@dataclass(slots=True)
class Selection:
    """The part of a run that is shown, moved by the keys."""

    index: Index
    file: Path
    batch: TrajectoryBatch = field(init=False)
    groups: list[Group] = field(default_factory=list)
    opened: OpenedTrajectory | None = None
    group: Group | None = None
    turn: int = 0
    _readers: dict[Path, TrajectoryReader] = field(default_factory=dict)  # by file of the batch

    def __post_init__(self) -> None:
        self.go_to(self.file)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the kind that is shown: training batches, or the evaluations of its name."""
        every = trajectory_files(self.index.path)
        if is_training(self.file) or len(every) < 2:
            return tuple(file for file in every if is_training(file)) or every
        return tuple(file for file in every if not is_training(file) and file.name == self.file.name)

    def go_to(self, file: Path) -> bool:
        """Show the first groups of a batch; True."""
        self.batch, self.file = self.index.batch(file), file
        self.groups = list(self.index.groups(self.batch, 0, PAGE))
        return True

    def more_groups(self) -> bool:
        """List the next groups of a large batch; False: there are no more."""
        added = self.index.groups(self.batch, len(self.groups), PAGE)
        self.groups += added
        return bool(added)

    def step(self, by: int) -> bool:
        """Go to another step; False: there is none."""
        files = self.files
        number = files.index(self.file) + by if self.file in files else len(files) - 1
        if not 0 <= number < len(files):
            return False
        return self.go_to(files[number])

    def other_kind(self) -> bool:
        """Go from training to the evaluations, through their names, and back; False: there is nothing else."""
        every = trajectory_files(self.index.path)
        names = list(dict.fromkeys(file.name for file in every if not is_training(file)))
        kinds: list[str | None] = [None, *names] if any(is_training(file) for file in every) else list(names)
        if len(kinds) < 2:
            return False
        kind = kinds[(kinds.index(None if is_training(self.file) else self.file.name) + 1) % len(kinds)]
        same = [file for file in every if (is_training(file) if kind is None else file.name == kind)]
        number = self.batch.number
        near = [
            file for file in same if number is not None and f"{number:06d}" in str(file.relative_to(self.index.path))
        ]
        return self.go_to((near or same)[-1])

    def show(self, record: IndexedTrajectory, turn: int = 0) -> OpenedTrajectory:
        """Open a trajectory at a turn."""
        if self.opened is None or self.opened.record != record:
            self.group = self.index.group(record)
            self.opened = self.read(record, self.group)
        self.turn = max(0, min(turn, len(self.opened.turns) - 1))
        return self.opened

    def read(self, record: IndexedTrajectory, group: Group) -> OpenedTrajectory:
        """Read a trajectory, without showing it."""
        file = record.file
        if file not in self._readers:
            batch = self.batch if file == self.batch.file else self.index.batch(file)
            self._readers[file] = TrajectoryReader(self.index, batch)
        largest = max(sibling.figures.context_tokens for sibling in group.siblings)
        return self._readers[file].open(record, largest=largest)

    def sibling(self, by: int) -> IndexedTrajectory | None:
        """The sibling beside the trajectory that is shown, around the ends."""
        if self.opened is None or self.group is None:
            return None
        names = [sibling.id for sibling in self.group.siblings]
        return self.group.siblings[(names.index(self.opened.record.id) + by) % len(names)]

    def command(self, listing: Listing | None) -> str:
        """The command that shows this again, beside the matches of a listing."""
        options = listing.options if listing is not None else ()
        if self.opened is None:
            return as_typed(shlex.join(("condensegrpo", "inspect", str(self.index.path), *options)))
        shown = ("--trajectory", self.opened.record.id, "--turn", str(self.turn))
        return as_typed(shlex.join((*command_of(self.index.path, self.opened.batch), *shown, *options)))


def fault(error: CondenseError) -> str:
    """An error as one line of a notice."""
    return neutral(str(error).splitlines()[0])
