"""The index of a run's trajectory files: the figures of every trajectory, found without reading its file again.

    index = Index(Path("runs/quickstart"))      # or a folder of `eval --save`, or one trajectory file
    for _ in index.extend(): ...                # reads what is new, in parts; `index.update()` in one go
    index.batches()                             # the steps in order, then the evaluations
    index.groups(batch), index.records(batch)   # figures: IndexedTrajectory
    index.read(record)                          # the trajectory itself, from its line in the file

The index is an SQLite file beside the trajectories, ``.inspection.sqlite``; in the user's cache where that folder is
read-only; in memory where both are. It is made of the files alone: delete it and it is built again. A file that grew is
read from where it ended, one that was replaced is read again. One index may be used by several threads.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from condensegrpo.core.errors import DataError
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.inspection.batches import TrajectoryBatch, credit_file, is_training, run_of, trajectory_files
from condensegrpo.inspection.database import COLUMNS, Database, KnownFile, read_new_lines, record, restored
from condensegrpo.inspection.filters import FIELDS, Value
from condensegrpo.inspection.records import Group, IndexedTrajectory, groups, natural
from condensegrpo.storage.codec import decode
from condensegrpo.storage.trajectories import Provenance, read_credit, read_trajectory

BATCH = "name, problem, provenance, count, success, signal"  # columns
ADVANTAGE = "(SELECT avg(value) FROM json_each(iif(json_valid(advantages), advantages, NULL)))"
EXPRESSIONS = {  # of ``filters.FIELDS`` of one trajectory: columns, except the mean advantage
    name: ADVANTAGE if name == "advantage" else attribute.removeprefix("figures.")
    for name, attribute in FIELDS.items()
    if name not in ("step", "evaluation")
}
REWARD_PART = "(SELECT value FROM json_each(components) WHERE key = '{}')"  # json_extract compares escaped letters


class RecordKey(NamedTuple):
    """What a record is read by."""

    file: Path
    number: int  # IndexedTrajectory.number
    start: int  # LineSpan.start


class Visit(NamedTuple):
    """One problem in one batch."""

    batch: TrajectoryBatch
    success: float  # the mean of ``correct``
    worst: int  # LineSpan.start of the least correct trajectory


class Progress(NamedTuple):
    """How far the index is."""

    done: int  # bytes of the files to read
    total: int


class Index:
    """The figures of all trajectories of a run, folder or file; see the top of this module."""

    def __init__(self, path: Path) -> None:
        """Open or begin the index of a path; reads no trajectory."""
        self.path = path
        run = run_of(path) if path.is_file() else None
        self._root = (run or (path if path.is_dir() else path.parent)).resolve()
        self._database = Database(self._root)
        self._names: dict[Path, str] = {}

    @property
    def note(self) -> str:
        """Where the index is, if not beside the trajectories; else nothing."""
        file = self._database.file
        where = "in memory, and made again at each start" if file is None else f"in {file}"
        beside = file is not None and file.parent == self._root
        return "" if beside else f"{self._root} cannot be written: the index is {where}"

    def update(self, files: Iterable[Path] | None = None) -> None:
        """Read all that is new in some files, by default of the whole path."""
        for _ in self.extend(files):
            pass

    def extend(self, files: Iterable[Path] | None = None) -> Iterator[Progress]:
        """Read what is new in some files, by default of the whole path, a part at each step of the iteration.

        Of a damaged file only the lines before the fault are read; it is raised after all other files were read.
        """
        chosen = tuple(trajectory_files(self.path) if files is None else files)
        if files is None and self.path.is_dir():
            self._database.forget_all_but({self._name(file) for file in chosen})
        sizes = [file.stat().st_size if file.exists() else 0 for file in chosen]
        before, damage = 0, None
        for file, size in zip(chosen, sizes, strict=True):
            try:
                for end in self._extend_file(file):
                    yield Progress(before + end, sum(sizes))
            except DataError as error:
                damage = damage or error
            before += size
            yield Progress(before, sum(sizes))
        if damage is not None:
            raise damage

    def batches(self) -> tuple[TrajectoryBatch, ...]:
        """The files that the index knows: the steps in order, then the evaluations."""
        known = {name: row for name, *row in self._database.rows(f"SELECT {BATCH} FROM files WHERE count > 0")}
        names = ((file, self._name(file)) for file in trajectory_files(self.path))
        return tuple(_batch(file, *known[name]) for file, name in names if name in known)

    def batch(self, file: Path) -> TrajectoryBatch:
        """The batch of one file."""
        rows = self._database.rows(f"SELECT {BATCH} FROM files WHERE name = ?", self._name(file))
        batch = _batch(file, *rows[0][1:]) if rows else None
        if batch is None or batch.trajectories == 0:
            problem = f": {batch.problems[0]}" if batch is not None and batch.problems else ""
            raise DataError(f"reading {file}: it holds no trajectory{problem}.")
        return batch

    def groups(self, batch: TrajectoryBatch, first: int = 0, most: int = -1) -> tuple[Group, ...]:
        """The groups of a batch in order: at most ``most`` (−1: all) from the one that is number ``first``."""
        names = self._database.rows(
            "SELECT DISTINCT natural FROM trajectories WHERE file = ? ORDER BY natural LIMIT ? OFFSET ?",
            self._key(batch.file), most, first,
        )  # fmt: skip
        return groups(tuple(self._span(batch.file, str(names[0][0]), str(names[-1][0])))) if names else ()

    def group(self, record: IndexedTrajectory) -> Group:
        """The group of a trajectory."""
        key = natural(record.figures.group_id)
        same = groups(tuple(self._span(record.span.file, key, key)))
        return next(group for group in same if group.id == record.figures.group_id)

    def at(self, batch: TrajectoryBatch, start: int) -> IndexedTrajectory | None:
        """The trajectory whose line begins at a byte of the file; None: the index has none."""
        rows = self._database.rows(
            "SELECT natural FROM trajectories WHERE file = ? AND start = ?", self._key(batch.file), start
        )
        group = (known for (key,) in rows for known in self._span(batch.file, key, key))
        return next((known for known in group if known.span.start == start), None)

    def records(self, batch: TrajectoryBatch | None = None) -> Iterator[IndexedTrajectory]:
        """The trajectories of a batch by groups and samples; without one, of all batches in order."""
        for each in (batch,) if batch is not None else self.batches():
            yield from self._span(each.file)

    def fields(
        self, names: Sequence[str], batch: TrajectoryBatch | None = None
    ) -> Iterator[tuple[RecordKey, dict[str, Value]]]:
        """Some of ``field_names`` of the trajectories, in the order of ``records``: faster than whole records."""
        columns = [name for name in names if name not in ("step", "evaluation")]
        expressions = "".join(f", {EXPRESSIONS.get(name, REWARD_PART.format(name))}" for name in columns)
        query = f"SELECT start{expressions} FROM trajectories WHERE file = ? ORDER BY natural, sample, id"
        for each in (batch,) if batch is not None else self.batches():
            of_batch: dict[str, Value] = {"step": each.number, "evaluation": each.evaluation}
            for number, (start, *values) in enumerate(self._database.pages(query, self._key(each.file))):
                stored = dict(zip(columns, map(restored, values), strict=True))
                yield RecordKey(each.file, number, start), of_batch | stored

    def field_names(self) -> tuple[str, ...]:
        """The names in conditions: ``filters.FIELDS``, then the parts of rewards."""
        parts = self._database.rows("SELECT DISTINCT key FROM trajectories, json_each(components)")
        return tuple(dict.fromkeys((*FIELDS, *(name for (name,) in parts if name.isidentifier()))))

    def record_of(self, key: RecordKey) -> IndexedTrajectory | None:
        """The record of a key; None: the file was replaced meanwhile."""
        query = f"SELECT {COLUMNS} FROM trajectories WHERE file = ? AND start = ?"
        rows = self._database.rows(query, self._key(key.file), key.start)
        return record(self.batch(key.file), key.number, rows[0]) if rows else None

    def visits(self, batch: TrajectoryBatch) -> Mapping[str, Visit]:
        """The problems of a batch."""
        rows = self._database.rows(  # SQLite takes ``start`` from the row of the minimum
            "SELECT problem_id, avg(correct), start, min(correct) FROM trajectories WHERE file = ? GROUP BY problem_id",
            self._key(batch.file),
        )
        return {restored(problem): Visit(batch, success, start) for problem, success, start, _ in rows}

    def follow(self, problem: str) -> tuple[tuple[TrajectoryBatch, Group], ...]:
        """What became of one problem: its groups in all batches, in order."""
        query = "SELECT DISTINCT name, natural FROM trajectories JOIN files USING (file) WHERE problem_id = ?"
        groups_of = {(str(name), str(key)) for name, key in self._database.rows(query, problem)}
        return tuple(
            (batch, group)
            for batch in self.batches()
            for name, key in sorted(groups_of)
            if name == self._name(batch.file)
            for group in groups(tuple(self._span(batch.file, key, key)))
            if group.problem == problem
        )

    def read(self, record: IndexedTrajectory) -> ScoredTrajectory:
        """The trajectory of a record, from its file."""
        return read_trajectory(record.span.file, self.line(record), record.span.line)[0]

    def line(self, record: IndexedTrajectory) -> bytes:
        """The line of a record, as it is stored."""
        span = record.span
        try:
            with span.file.open("rb") as file:
                file.seek(span.start)
                return file.read(span.size)
        except OSError as error:
            raise DataError(f"reading {span.file}: {error.strerror}.") from error

    def close(self) -> None:
        """Close the index file."""
        self._database.close()

    def _span(self, file: Path, low: str = "", high: str = "\U0010ffff") -> Iterator[IndexedTrajectory]:
        """The trajectories of some groups that follow each other in a file, by their sort keys."""
        key, batch = self._key(file), self.batch(file)
        ((before,),) = self._database.rows("SELECT count(*) FROM trajectories WHERE file = ? AND natural < ?", key, low)
        rows = self._database.pages(
            f"SELECT {COLUMNS} FROM trajectories WHERE file = ? AND natural BETWEEN ? AND ? "
            "ORDER BY natural, sample, id",
            key, low, high,
        )  # fmt: skip
        for number, row in enumerate(rows, int(before or 0)):
            yield record(batch, number, row)

    def _extend_file(self, file: Path) -> Iterator[int]:
        """Read what is new in a file; yields how far, in bytes. Credit that came since is added."""
        query = "SELECT size, modified, end, lines, tail FROM files WHERE name = ? AND size IS NOT NULL"
        known = self._database.rows(query, self._name(file))
        changed = False
        for added in read_new_lines(file, KnownFile(*known[0]) if known else KnownFile()):
            self._database.add(self._key(file), added)
            changed = True
            yield added.known.end
        credit = credit_file(file)
        modified = credit.stat().st_mtime_ns if credit is not None and credit.is_file() else None
        stored = self._database.rows("SELECT credit FROM files WHERE name = ?", self._name(file))
        if credit is not None and modified is not None and stored != [(modified,)]:
            self._database.add_credit(self._key(file), read_credit(credit), modified)
        elif changed:
            self._database.summarise(self._key(file))

    def _key(self, file: Path) -> int:
        return self._database.key(self._name(file))

    def _name(self, file: Path) -> str:
        name = self._names.get(file)
        if name is None:
            name = self._names[file] = os.path.relpath(file.resolve(), self._root)
        return name


def _batch(
    file: Path,
    problem: str | None,
    provenance: str | None,
    count: int,
    success: float,
    signal: float | None,
) -> TrajectoryBatch:
    known = decode(Provenance, json.loads(provenance)) if provenance is not None else None
    digits = file.stem.removeprefix("step_")
    return TrajectoryBatch(
        file=file,
        run=run_of(file),
        number=int(digits) if is_training(file) and digits.isdecimal() else known.step if known else None,
        provenance=known,
        is_evaluation=known is not None and known.evaluation is not None,
        problems=(problem,) if problem is not None else (),
        trajectories=count,
        success=success,
        signal=signal,
    )
