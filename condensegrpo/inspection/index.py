"""The trajectories of a run, folder or file: the figures of all, and single trajectories when they are opened.

    index = Index(Path("runs/quickstart"))      # or a folder of `eval --save`, or one trajectory file
    index.batches()                             # the steps in order, then the evaluations
    index.groups(batch), index.records(batch)   # figures: IndexedTrajectory
    index.read(record)                          # the trajectory itself

The figures of a batch are read when they are first needed, and again when its files changed. Any thread may use it.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, repeat
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from condensegrpo.core.errors import DataError
from condensegrpo.core.scored_trajectory import ScoredTrajectory, price
from condensegrpo.inspection.batches import TrajectoryBatch, credit_file, is_training, run_of, trajectory_files
from condensegrpo.inspection.filters import FIELDS, Value
from condensegrpo.inspection.records import Group, IndexedTrajectory, groups, mean, natural
from condensegrpo.storage.codec import decode
from condensegrpo.storage.trajectories import (
    Credit,
    Provenance,
    Row,
    StoredTrajectory,
    credit_schema,
    figures_in,
    named,
    parts_of,
    provenance_of,
    read_figures,
    read_table,
    read_trajectory,
    unedited,
)

if TYPE_CHECKING:
    import pyarrow

COLUMNS = {  # of ``filters.FIELDS`` of one trajectory; the others are those of its batch, or computed of columns
    name: attribute.removeprefix("figures.").replace("turns", "turn_count")
    for name, attribute in FIELDS.items()
    if name not in ("step", "evaluation", "advantage", "price")
}
CREDIT = ("advantages", "weights", "handling")  # columns
PRICED = ("prompt_tokens", "prompt_tokens_uncached", "output_tokens", "rejected_tokens", "draft_tokens")  # of ``price``


class RecordKey(NamedTuple):
    """What a record is read by."""

    file: Path  # of the batch
    number: int  # IndexedTrajectory.number


class Visit(NamedTuple):
    """One problem in one batch."""

    batch: TrajectoryBatch
    success: float  # the mean of ``correct``
    worst: int  # IndexedTrajectory.number of the least correct trajectory


class Progress(NamedTuple):
    """How many files were read."""

    done: int
    total: int


class Index:
    """The trajectories of a run, folder or file; see the top of this module."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self.path = path
        self._known: dict[Path, _BatchFigures] = {}

    def update(self, files: Iterable[Path] | None = None) -> None:
        """Read the figures of some files, by default of the whole path."""
        for _ in self.extend(files):
            pass

    def extend(self, files: Iterable[Path] | None = None) -> Iterator[Progress]:
        """Read the figures of some files that are new or changed, by default of the whole path, one at each step.

        A file that cannot be read is raised after all others were read.
        """
        chosen, damage = tuple(trajectory_files(self.path) if files is None else files), None
        for number, file in enumerate(chosen, 1):
            try:
                self._figures(file)
            except DataError as error:
                damage = damage or error
            yield Progress(number, len(chosen))
        if damage is not None:
            raise damage

    def batches(self) -> tuple[TrajectoryBatch, ...]:
        """The files that were read: the steps in order, then the evaluations."""
        known = (self._known.get(file) for file in trajectory_files(self.path))
        return tuple(each.batch for each in known if each is not None and each.batch.trajectories)

    def batch(self, file: Path) -> TrajectoryBatch:
        """The batch of one file."""
        batch = self._figures(file).batch
        if not batch.trajectories:
            raise DataError(f"reading {file}: it holds no trajectory.")
        return batch

    def groups(self, batch: TrajectoryBatch, first: int = 0, most: int | None = None) -> tuple[Group, ...]:
        """The groups of a batch in order: at most ``most`` (None: all) from the one that is number ``first``."""
        figures = self._figures(batch.file)
        starts = [*figures.starts, batch.trajectories]
        last = len(starts) - 1 if most is None else min(first + most, len(starts) - 1)
        return groups(figures.records(range(starts[first], starts[last]))) if first < last else ()

    def group(self, record: IndexedTrajectory) -> Group:
        """The group of a trajectory."""
        figures = self._figures(record.file)
        number = bisect_right(figures.starts, record.number) - 1
        end = (*figures.starts, len(figures.table))[number + 1]
        return groups(figures.records(range(figures.starts[number], end)))[0]

    def at(self, key: RecordKey) -> IndexedTrajectory:
        """The record of a key."""
        (record,) = self._figures(key.file).records([key.number])
        return record

    def records(self, batch: TrajectoryBatch | None = None) -> Iterator[IndexedTrajectory]:
        """The trajectories of a batch by groups and samples; without one, of all batches in order."""
        for each in (batch,) if batch is not None else self.batches():
            yield from self._figures(each.file).records(range(each.trajectories))

    def fields(
        self, names: Sequence[str], batch: TrajectoryBatch | None = None
    ) -> Iterator[tuple[RecordKey, dict[str, Value]]]:
        """Some of ``field_names`` of the trajectories, in the order of ``records``: faster than whole records."""
        for each in (batch,) if batch is not None else self.batches():
            of_batch: dict[str, Value] = {"step": each.number, "evaluation": each.evaluation}
            for number, values in enumerate(self._figures(each.file).fields(names)):
                yield RecordKey(each.file, number), of_batch | values

    def field_names(self) -> tuple[str, ...]:
        """The names in conditions: ``filters.FIELDS``, then the parts of rewards."""
        parts = (name for each in self._known.values() for name in each.reward_parts)
        return tuple(dict.fromkeys((*FIELDS, *(name for name in parts if name.isidentifier()))))

    def visits(self, batch: TrajectoryBatch) -> Mapping[str, Visit]:
        """The problems of a batch."""
        found: dict[str, list[tuple[float, int]]] = {}
        for number, row in enumerate(self._figures(batch.file).fields(("problem", "correct"))):
            found.setdefault(str(row["problem"]), []).append((float(row["correct"] or 0), number))
        return {name: Visit(batch, fmean(correct for correct, _ in each), min(each)[1]) for name, each in found.items()}

    def follow(self, problem: str) -> tuple[tuple[TrajectoryBatch, Group], ...]:
        """The groups of one problem in all batches, in order."""
        return tuple(
            (batch, group)
            for batch in self.batches()
            for group in groups(self._figures(batch.file).of_problem(problem))
        )

    def stored(self, batch: TrajectoryBatch, file: Path, rows: Sequence[int]) -> tuple[IndexedTrajectory, ...]:
        """The trajectories of some rows of a file of a batch, in order."""
        return self._figures(batch.file).stored_in(file, rows) if rows else ()

    def read(self, record: IndexedTrajectory) -> ScoredTrajectory:
        """The trajectory of a record, from its file."""
        return read_trajectory(record.stored)

    def _figures(self, file: Path) -> "_BatchFigures":
        parts, credit = parts_of(file) or [file], credit_file(file)
        stamp = tuple(map(_stamp, (*parts, *([] if credit is None else [credit]))))
        known = self._known.get(file)
        if known is None or known.stamp != stamp:
            known = self._known[file] = _BatchFigures(file, parts, stamp)
        return known


class _BatchFigures:
    """The figures of one batch in memory, by groups and samples, with its credit."""

    def __init__(self, file: Path, parts: Sequence[Path], stamp: object) -> None:
        """``stamp``: of its files as they are read here."""
        import numpy
        import pyarrow

        self.stamp, self._parts = stamp, parts
        tables = [read_figures(part) for part in parts]
        self._firsts, table = [*accumulate(map(len, tables), initial=0)][:-1], pyarrow.concat_tables(tables)
        groups_of = table["group_id"].combine_chunks().dictionary_encode()
        names, codes = groups_of.dictionary.to_pylist(), numpy.from_dlpack(groups_of.indices)
        by_name = sorted(range(len(names)), key=lambda code: natural(names[code]))
        codes = numpy.argsort(numpy.array(by_name, dtype=int))[codes]
        self._rows: list[int] = numpy.lexsort((numpy.from_dlpack(table["sample"].combine_chunks()), codes)).tolist()
        self.starts: list[int] = numpy.flatnonzero(numpy.diff(codes[self._rows], prepend=-1)).tolist()  # of groups
        self.table = _with_credit(table.take(_indices(self._rows)), credit_file(file))
        self.batch = _batch(file, next(filter(None, map(provenance_of, tables)), None), self.table, self.starts)

    def records(self, numbers: Sequence[int]) -> tuple[IndexedTrajectory, ...]:
        """The trajectories of some numbers."""
        rows = self.table.take(_indices(numbers)).to_pylist() if numbers else []
        return tuple(self._record(number, row) for number, row in zip(numbers, rows, strict=True))

    @cached_property
    def _numbers(self) -> list[int]:
        """By row in the files: the inverse of ``_rows``."""
        numbers = [0] * len(self._rows)
        for number, row in enumerate(self._rows):
            numbers[row] = number
        return numbers

    def stored_in(self, file: Path, rows: Sequence[int]) -> tuple[IndexedTrajectory, ...]:
        """The trajectories of some rows of a file."""
        first = self._firsts[self._parts.index(file)]
        return self.records(sorted(self._numbers[first + row] for row in rows))

    def of_problem(self, problem: str) -> tuple[IndexedTrajectory, ...]:
        """The trajectories of a problem."""
        from pyarrow import compute

        return self.records(compute.indices_nonzero(compute.equal(self.table["problem_id"], problem)).to_pylist())

    def fields(self, names: Sequence[str]) -> Iterator[dict[str, Value]]:
        """Some fields of every trajectory, without those of the batch."""
        columns = {name: self.table[column].to_pylist() for name, column in COLUMNS.items() if name in names}
        if "advantage" in names:
            columns["advantage"] = [mean(values) for values in self.table["advantages"].to_pylist()]
        if "price" in names:
            columns["price"] = [*map(price, *(self.table[name].to_pylist() for name in PRICED))]
        parts = [name for name in names if name not in FIELDS]
        components = map(named, self.table["components"].to_pylist()) if parts else repeat({}, len(self.table))
        rows = zip(*columns.values(), strict=True) if columns else repeat((), len(self.table))
        for row, found in zip(rows, components, strict=True):
            yield dict(zip(columns, row, strict=True)) | {name: found.get(name) for name in parts}

    @cached_property
    def reward_parts(self) -> tuple[str, ...]:
        """The names of the parts of the rewards."""
        return tuple(dict.fromkeys(part["name"] for row in self.table["components"].to_pylist() for part in row))

    def _record(self, number: int, row: Row) -> IndexedTrajectory:
        stored = self._rows[number]
        part = bisect_right(self._firsts, stored) - 1
        credit = {name: row[name] for name in CREDIT}
        with unedited(self.batch.file, row["id"]):
            return IndexedTrajectory(
                number=number,
                step=self.batch.number,
                evaluation=self.batch.evaluation,
                figures=figures_in(row),
                question=row["question"],
                ground_truth=row["ground_truth"],
                answer=row["answer"],
                credit=None if credit["handling"] is None else decode(Credit, {"trajectory": row["id"]} | credit),
                file=self.batch.file,
                stored=StoredTrajectory(self._parts[part], stored - self._firsts[part]),
            )


def _indices(numbers: Sequence[int]) -> "pyarrow.Array":
    """Numbers as pyarrow takes them; ``pyarrow.array`` and ``to_numpy`` would import pandas."""
    import pyarrow

    data = pyarrow.py_buffer(array("q", numbers))
    return pyarrow.Int64Array.from_buffers(pyarrow.int64(), len(numbers), [None, data])


def _with_credit(table: "pyarrow.Table", file: Path | None) -> "pyarrow.Table":
    """Figures with the columns of their credit; null where there is none."""
    import pyarrow

    known, columns = dict[str, int](), {name: list[pyarrow.Array]() for name in CREDIT}
    if file is not None and file.is_file():
        credit = read_table(file, ("trajectory", *CREDIT), schema=credit_schema())
        known = {name: row for row, name in enumerate(credit["trajectory"].to_pylist())}
        columns = {name: credit[name].chunks for name in CREDIT}
    rows = _indices([known.get(name, len(known)) for name in table["id"].to_pylist()])
    for name, chunks in columns.items():
        missing = pyarrow.nulls(1, credit_schema().field(name).type)
        table = table.append_column(name, pyarrow.chunked_array([*chunks, missing]).take(rows))
    return table


def _batch(file: Path, known: Provenance | None, table: "pyarrow.Table", starts: Sequence[int]) -> TrajectoryBatch:
    from pyarrow import compute

    advantages = table["advantages"].combine_chunks()
    learned = compute.indices_nonzero(compute.is_valid(advantages)).to_pylist()
    parents = compute.list_parent_indices(advantages)
    taught = parents.filter(compute.list_flatten(advantages).cast("bool")).unique().to_pylist()
    with_credit, with_signal = ({bisect_right(starts, row) for row in rows} for rows in (learned, taught))
    digits = file.stem.removeprefix("step_")
    return TrajectoryBatch(
        file=file,
        run=run_of(file),
        number=int(digits) if is_training(file) and digits.isdecimal() else known.step if known else None,
        provenance=known,
        is_evaluation=known is not None and known.evaluation is not None,
        trajectories=len(table),
        success=compute.mean(table["correct"]).as_py() or 0.0,
        largest=compute.max(table["context_tokens"]).as_py() or 0,
        signal=len(with_signal) / len(with_credit) if with_credit else None,
    )


def _stamp(file: Path) -> tuple[int, int] | None:
    """Changes when a file is replaced; None: there is no such file."""
    try:
        about = file.stat()
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns
