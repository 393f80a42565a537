"""The trajectories of a run, folder or file: the figures of all, and single trajectories when they are opened.

    index = Index(Path("runs/quickstart"))      # or a folder of `eval --save`, or one trajectory file
    index.batches()                             # the steps in order, then the evaluations: TrajectoryBatch
    batch.groups(), batch.records()             # figures: IndexedTrajectory
    record.read(), batch.open(record)           # the trajectory itself, and with all that is shown of it

The figures of a batch are read when they are first needed, and again when its files changed. Any thread may use it.
"""

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, repeat
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from condensegrpo.core.errors import CondenseError, DataError
from condensegrpo.core.scored_trajectory import ScoredTrajectory, price
from condensegrpo.inspection.batches import (
    credit_file,
    credit_of,
    files_in,
    is_training,
    run_of,
    tokenizer_files,
    trajectory_files,
)
from condensegrpo.inspection.credit import CreditLine, credit_lines
from condensegrpo.inspection.filters import FIELDS, Value
from condensegrpo.inspection.history import HistoryPiece, history
from condensegrpo.inspection.panes import TokenTexts, TokenView, TurnView, turns
from condensegrpo.inspection.records import Group, IndexedTrajectory, groups, mean, natural
from condensegrpo.storage.codec import decode
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import (
    Credit,
    Row,
    StoredTrajectory,
    credit_schema,
    figures_in,
    named,
    parts_in,
    parts_of,
    provenance_of,
    read_figures,
    read_table,
    unedited,
)

if TYPE_CHECKING:
    import pyarrow

    from condensegrpo.config.schema import RunConfig

COLUMNS = {  # of ``filters.FIELDS`` of one trajectory; the others are those of its batch, or computed of columns
    name: attribute.removeprefix("figures.").replace("turns", "turn_count")
    for name, attribute in FIELDS.items()
    if name not in ("step", "evaluation", "advantage", "price")
}
CREDIT = ("advantages", "weights", "handling")  # columns
PRICED = ("prompt_tokens", "prompt_tokens_uncached", "output_tokens", "rejected_tokens", "draft_tokens")  # of ``price``


class Visit(NamedTuple):
    """One problem in one batch."""

    batch: "TrajectoryBatch"
    success: float  # the mean of ``correct``
    worst: int  # IndexedTrajectory.number of the least correct trajectory


class Index:
    """The trajectories of a run, folder or file; see the top of this module."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self.path = path
        self._known: dict[Path, TrajectoryBatch] = {}

    def update(self, files: Iterable[Path] | None = None) -> None:
        """Read the figures of some files, by default of the whole path."""
        for _ in self.extend(files):
            pass

    def extend(self, files: Iterable[Path] | None = None) -> Iterator[float]:
        """Read the figures of some files that are new or changed, by default of the whole path, and yield the share
        that was read after each.

        A file that cannot be read is raised after all others were read.
        """
        chosen, damage = tuple(trajectory_files(self.path) if files is None else files), None
        for number, file in enumerate(chosen, 1):
            try:
                self._read(file)
            except DataError as error:
                damage = damage or error
            yield number / len(chosen)
        if damage is not None:
            raise damage

    def batches(self) -> "tuple[TrajectoryBatch, ...]":
        """The files that were read, as they are now: the steps in order, then the evaluations.

        A file that can no longer be read stays as it was.
        """
        known = [file for file in trajectory_files(self.path) if file in self._known]
        further = {folder: parts_in(folder) for folder in {file.parent for file in known}}
        for file in known:
            with suppress(DataError):
                self._read(file, [file, *further[file.parent].get(file.name, ())])
        return tuple(batch for file in known if (batch := self._known[file]).trajectories)

    def batch(self, file: Path) -> "TrajectoryBatch":
        """The batch of one file, read again if it was replaced."""
        batch = self._read(file)
        if not batch.trajectories:
            raise DataError(f"reading {file}: it holds no trajectory.")
        return batch

    def records(self) -> Iterator[IndexedTrajectory]:
        """The trajectories of all batches in order."""
        return (record for batch in self.batches() for record in batch.records())

    def field_names(self) -> tuple[str, ...]:
        """The names in conditions: ``filters.FIELDS``, then the parts of rewards."""
        parts = (name for each in self._known.values() for name in each.reward_parts)
        return tuple(dict.fromkeys((*FIELDS, *(name for name in parts if name.isidentifier()))))

    def follow(self, problem: str) -> "tuple[tuple[TrajectoryBatch, Group], ...]":
        """The groups of one problem in all batches, in order."""
        return tuple((batch, group) for batch in self.batches() for group in batch.of_problem(problem))

    def _read(self, file: Path, parts: Sequence[Path] | None = None) -> "TrajectoryBatch":
        """The batch of a file, read if that is new or changed; ``parts``: the file and its parts, if they are known."""
        parts, credit = parts or parts_of(file) or [file], credit_file(file)
        stamp = tuple(map(_stamp, (*parts, *([] if credit is None else [credit]))))
        known = self._known.get(file)
        if known is None or known.stamp != stamp:
            known = self._known[file] = TrajectoryBatch(file, parts, stamp)
        return known


class TrajectoryBatch:
    """The trajectories of one file and its parts: a step or an evaluation, its figures in memory, with its credit."""

    def __init__(self, file: Path, parts: Sequence[Path], stamp: object) -> None:
        """``stamp``: of its files as they are read here."""
        import numpy
        import pyarrow
        from pyarrow import compute

        self.file, self.stamp, self.parts = file, stamp, parts
        self.run = run_of(file)  # the run folder that the file lies in
        tables = [read_figures(part) for part in parts]
        self._firsts, table = [*accumulate(map(len, tables), initial=0)][:-1], pyarrow.concat_tables(tables)
        groups_of = table["group_id"].combine_chunks().dictionary_encode()
        names, codes = groups_of.dictionary.to_pylist(), numpy.from_dlpack(groups_of.indices)
        by_name = sorted(range(len(names)), key=lambda code: natural(names[code]))
        codes = numpy.argsort(numpy.array(by_name, dtype=int))[codes]
        # by groups and samples
        self._rows: list[int] = numpy.lexsort((numpy.from_dlpack(table["sample"].combine_chunks()), codes)).tolist()
        self._starts: list[int] = numpy.flatnonzero(numpy.diff(codes[self._rows], prepend=-1)).tolist()  # of groups
        self._table = _with_credit(table.take(_indices(self._rows)), credit_file(file))
        self.provenance = next(filter(None, map(provenance_of, tables)), None)  # None: it was not given
        self.trajectories = len(table)  # how many
        self.success: float = compute.mean(table["correct"]).as_py() or 0.0  # the mean of ``correct``
        self.largest: int = compute.max(table["context_tokens"]).as_py() or 0  # context tokens of any trajectory

    def __repr__(self) -> str:
        return f"TrajectoryBatch({str(self.file)!r}, {self.title!r}, trajectories={self.trajectories})"

    @cached_property
    def number(self) -> int | None:
        """The step, if the file lies in a run folder or says it."""
        digits = self.file.stem.removeprefix("step_")
        if is_training(self.file) and digits.isdecimal():
            return int(digits)
        return self.provenance.step if self.provenance is not None else None

    @property
    def is_evaluation(self) -> bool:
        """Whether they were sampled to evaluate, so that nothing is learned from them."""
        return self.provenance is not None and self.provenance.evaluation is not None

    @property
    def evaluation(self) -> str | None:
        """The name of the evaluation, or of its file; None: it is a training batch."""
        name = self.provenance.evaluation if self.provenance is not None else None
        return name if name is None else name or self.file.stem

    @property
    def title(self) -> str:
        """``step 6``, or ``held-out, after step 6``."""
        step = "" if self.number is None else f"step {self.number}"
        if self.evaluation is None:
            return step or "trajectories"
        return f"{self.evaluation}, after {step}" if step else self.evaluation

    def command(self, path: Path) -> tuple[str, ...]:
        """The arguments of the command that shows it, of a run, of a folder, or of a file."""
        # else no path has the step
        stepped = is_training(self.file) or re.fullmatch(r"step_\d+", self.file.parent.name)
        step = ("--step", str(self.number)) if path.is_dir() and self.number is not None and stepped else ()
        evaluation = ("--evaluation", self.evaluation or self.file.stem)
        named = evaluation if path.is_dir() and not is_training(self.file) else ()
        return ("condensegrpo", "inspect", str(path), *step, *named)

    @property
    def beside(self) -> tuple[str, ...]:
        """Names of the other evaluations of the same policy."""
        every = files_in(self.file.parent) if self.is_evaluation else ()
        return tuple(other.stem for other in every if other != self.file)

    @cached_property
    def signal(self) -> float | None:
        """Share of the groups of which a member has an advantage; None: no credit was given (yet)."""
        from pyarrow import compute

        advantages = self._table["advantages"].combine_chunks()
        learned = compute.indices_nonzero(compute.is_valid(advantages)).to_pylist()
        parents = compute.list_parent_indices(advantages)
        taught = parents.filter(compute.list_flatten(advantages).cast("bool")).unique().to_pylist()
        with_credit, with_signal = ({bisect_right(self._starts, row) for row in rows} for rows in (learned, taught))
        return len(with_signal) / len(with_credit) if with_credit else None

    @property
    def no_signal_share(self) -> float | None:
        """Share of the groups of which no member has an advantage; None: no credit was given (yet)."""
        return None if self.signal is None else 1 - self.signal

    # its trajectories

    def records(self, numbers: Sequence[int] | None = None) -> tuple[IndexedTrajectory, ...]:
        """The trajectories by groups and samples: those of some numbers, or all."""
        numbers = range(self.trajectories) if numbers is None else numbers
        rows = self._table.take(_indices(numbers)).to_pylist() if numbers else []
        return tuple(self._record(number, row) for number, row in zip(numbers, rows, strict=True))

    def at(self, number: int) -> IndexedTrajectory:
        """The trajectory of a number."""
        return self.records([number])[0]

    def groups(self, first: int = 0, most: int | None = None) -> tuple[Group, ...]:
        """The groups in order: at most ``most`` (None: all) from the one that is number ``first``."""
        starts = [*self._starts, self.trajectories]
        last = len(starts) - 1 if most is None else min(first + most, len(starts) - 1)
        return groups(self.records(range(starts[first], starts[last]))) if first < last else ()

    def group(self, record: IndexedTrajectory) -> Group:
        """The group of a trajectory."""
        return self.groups(bisect_right(self._starts, record.number) - 1, 1)[0]

    def of_problem(self, problem: str) -> tuple[Group, ...]:
        """The groups of a problem."""
        from pyarrow import compute

        same = compute.equal(self._table["problem_id"], problem)
        return groups(self.records(compute.indices_nonzero(same).to_pylist()))

    def stored(self, file: Path, rows: Sequence[int]) -> tuple[IndexedTrajectory, ...]:
        """The trajectories of some rows of one of its files, in order."""
        first = self._firsts[self.parts.index(file)]
        return self.records(sorted(self._numbers[first + row] for row in rows))

    @cached_property
    def _numbers(self) -> list[int]:
        """By row in the files: the inverse of ``_rows``."""
        numbers = [0] * len(self._rows)
        for number, row in enumerate(self._rows):
            numbers[row] = number
        return numbers

    def visits(self) -> Mapping[str, Visit]:
        """Its problems."""
        found: dict[str, list[tuple[float, int]]] = {}
        for number, row in self.fields(("problem", "correct")):
            found.setdefault(str(row["problem"]), []).append((float(row["correct"] or 0), number))
        return {name: Visit(self, fmean(correct for correct, _ in each), min(each)[1]) for name, each in found.items()}

    def fields(self, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Value]]]:
        """Some of ``Index.field_names`` of the trajectories, by number: faster than whole records."""
        table = self._table
        columns = {name: table[column].to_pylist() for name, column in COLUMNS.items() if name in names}
        if "advantage" in names:
            columns["advantage"] = [mean(values) for values in table["advantages"].to_pylist()]
        if "price" in names:
            columns["price"] = [*map(price, *(table[name].to_pylist() for name in PRICED))]
        parts = [name for name in names if name not in FIELDS]
        components = map(named, table["components"].to_pylist()) if parts else repeat({}, len(table))
        rows = zip(*columns.values(), strict=True) if columns else repeat((), len(table))
        common: dict[str, Value] = {"step": self.number, "evaluation": self.evaluation}
        for number, (row, found) in enumerate(zip(rows, components, strict=True)):
            yield number, common | dict(zip(columns, row, strict=True)) | {name: found.get(name) for name in parts}

    @cached_property
    def reward_parts(self) -> tuple[str, ...]:
        """The names of the parts of the rewards."""
        return tuple(dict.fromkeys(part["name"] for row in self._table["components"].to_pylist() for part in row))

    def _record(self, number: int, row: Row) -> IndexedTrajectory:
        stored = self._rows[number]
        part = bisect_right(self._firsts, stored) - 1
        credit = {name: row[name] for name in CREDIT}
        with unedited(self.file, row["id"]):
            return IndexedTrajectory(
                number=number,
                step=self.number,
                evaluation=self.evaluation,
                figures=figures_in(row),
                question=row["question"],
                ground_truth=row["ground_truth"],
                answer=row["answer"],
                credit=None if credit["handling"] is None else decode(Credit, {"trajectory": row["id"]} | credit),
                file=self.file,
                stored=StoredTrajectory(self.parts[part], stored - self._firsts[part]),
            )

    # one of them, opened

    @cached_property
    def texts(self) -> TokenTexts:
        """The texts of tokens."""
        return TokenTexts(tokenizer_files(self.file, self.provenance))

    @property
    def budget(self) -> int | None:
        """The context budget in tokens; None: it is not known."""
        return self.provenance.max_context_tokens if self.provenance is not None else None

    @cached_property
    def _config(self) -> "RunConfig | None":
        """The configuration of the run at this step; None: none can be read. The first screen does not need it."""
        from condensegrpo.config.load import load_config  # imports pydantic: only when needed
        from condensegrpo.config.resumed import config_at

        if self.run is None:
            return None
        run = RunFolder(self.run)
        try:
            return load_config(run.config) if self.number is None else config_at(run, self.number)
        except CondenseError:
            return None

    @cached_property
    def _credit(self) -> dict[str, Credit]:
        """The credit with the terms of advantages, by trajectory."""
        return credit_of(self.file) or {}

    def open(self, record: IndexedTrajectory, *, tokens: bool = False) -> "OpenedTrajectory":
        """Read a trajectory; where the budget is not known, the largest context of the batch stands for it.

        Args:
            record: which one.
            tokens: whether its turns have their sampled tokens.
        """
        scored = record.read()
        views = turns(
            scored,
            record.credit,
            budget=self.largest if self.budget is None else self.budget,
            tokenizer=self.texts if tokens else None,
            # the versions of an evaluation count the steps of its weights only if these are known
            version_known=not self.is_evaluation or self.number is not None,
        )
        return OpenedTrajectory(record=record, scored=scored, turns=views, batch=self)

    def credit(self, record: IndexedTrajectory, group: Group, turn: TurnView) -> tuple[CreditLine, ...]:
        """The steps from the reward to the weight of a turn's tokens, in the trajectory's group."""
        return credit_lines(record, group, turn, self._config, self._credit.get(record.id))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTrajectory:
    """A trajectory that was read from its file."""

    record: IndexedTrajectory
    scored: ScoredTrajectory
    turns: tuple[TurnView, ...]
    batch: TrajectoryBatch

    def pieces(self, turn: int) -> tuple[HistoryPiece, ...]:
        """The whole history before a turn, with what was dropped and rewritten in its place."""
        return history(self.scored.trajectory, turn, self.turns[turn].context.statuses)

    def credit(self, turn: int, group: Group) -> tuple[CreditLine, ...]:
        """The steps from the reward to the weight of a turn's tokens, in the trajectory's group."""
        return self.batch.credit(self.record, group, self.turns[turn])

    def prompt(self, turn: int) -> str | None:
        """The prompt of a turn as text, special tokens included; None: there is no tokenizer."""
        return self.batch.texts.prompt(self.scored.trajectory.turns[turn])

    def tokens(self, turn: int) -> tuple[TokenView, ...]:
        """The sampled tokens of a turn."""
        return self.batch.texts.views(self.scored.trajectory.turns[turn])


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


def _stamp(file: Path) -> tuple[int, int] | None:
    """Changes when a file is replaced; None: there is no such file."""
    try:
        about = file.stat()
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns
