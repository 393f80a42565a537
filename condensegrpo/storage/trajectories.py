"""Trajectories and their credit as Parquet: a file for each batch and evaluation, written at once.

trajectories/step_000001.parquet            a row for each trajectory
trajectories/step_000001.part-1.parquet     those of another rank: a part of the same batch
credit/step_000001.parquet                  a row for each of them, written after the step

The columns of a trajectory: ``Provenance``, ``TrajectoryStats`` (``turns`` is ``turn_count``), texts, every message
once, and the turns. ``context``, ``reply`` and ``observations`` of a turn are indices of ``messages``.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from condensegrpo.core.errors import TrajectoryFileError
from condensegrpo.core.failures import PluginFailure
from condensegrpo.core.messages import MediaPart, Message, TextPart, ToolCall, encodable
from condensegrpo.core.process import rare_collections
from condensegrpo.core.scored_trajectory import ScoredTrajectory, TrajectoryStats
from condensegrpo.core.shared_sequence import SharedSequence, packed_ids, shared_ids
from condensegrpo.core.trajectory import Rejected, Score, Trajectory, Turn
from condensegrpo.storage.codec import decode, fields_of
from condensegrpo.storage.files import write_atomically, writing

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

ROWS = 64  # of a row group, which is read to show one of them
IDS = 1 << 21  # prompt ids of a row group, at most unless one trajectory has more
PART = ".part-"  # in the name of a file that holds further rows of another
INDICES = ("prompt_ids", "output_ids", "context", "observations", "reply")  # 32 bits each
NESTED = ("turns", "messages", "rejected_texts", "turn_rewards", "failure", "detail")  # columns that lists do not need

SPARSE = (".information", ".terms.values")  # lists whose elements may be null
PAIR = {"name", "value"}  # the fields of the pairs that stand for a mapping: neither may be null
PLAIN = (int, float, bool)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a trajectory was sampled for and with: the same for all of a file."""

    evaluation: str | None  # its name, held-out or that of a variant; None: a training batch
    step: int | None  # optimiser step that the batch is for, or that the evaluated policy has taken; None: not known
    model: str  # the folder or Hub id that GRPO started from, or the policy that was evaluated
    condenser: str
    max_context_tokens: int  # the budget of a prompt: rollout.limits.max_context_tokens
    temperature: float  # 0: greedy
    seed: int  # of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditTerm:
    """What an advantage is the sum of; null where a turn does not have it."""

    name: str  # as in the estimator's formula
    values: tuple[float | None, ...]  # (K,)
    numbers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # (K,) that it comes from, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What each turn of one trajectory was trained with."""

    trajectory: str  # Trajectory.id
    advantages: tuple[float, ...]  # (K,) of every trained token of the turn
    weights: tuple[float, ...]  # (K,) of one trained token of the turn in the optimiser step; 0.0: not trained
    handling: Literal["train", "mask", "penalise", "drop"] = "train"  # by its stop; drop: by dynamic sampling
    terms: tuple[CreditTerm, ...] = ()  # that the advantages are the sum of, before whitening; empty: none were given

    def __post_init__(self) -> None:
        if len(self.advantages) != len(self.weights):
            raise ValueError(
                f"credit needs one weight per advantage: {len(self.advantages)} advantages, {len(self.weights)} weights"
            )


class StoredTrajectory(NamedTuple):
    """Where a trajectory is stored."""

    file: Path
    row: int  # in the file, from 0


# files


def write_trajectories(
    path: Path, trajectories: Iterable[ScoredTrajectory], provenance: Provenance | None = None
) -> None:
    """Write a file whole; it replaces one of this name. Floats read back equal to the last bit."""
    known = {} if provenance is None else _plain(provenance)
    rows = (known | row_of(scored) for scored in trajectories)
    with rare_collections():
        _write(path, trajectory_schema(), _row_groups(rows))


def read_trajectories(path: Path) -> tuple[ScoredTrajectory, ...]:
    """The trajectories of a file and its parts, in the order in which they were written."""
    parts = [(part, group) for part in parts_of(path) or [path] for group in range(opened(part).num_row_groups)]
    return tuple(_scored(row, path) for part, group in parts for row in _rows(read_table(part, group=group), part))


def sample_trajectories(path: Path, count: int) -> list[ScoredTrajectory]:
    """At most ``count`` trajectories, evenly over a file."""
    rows = opened(path).metadata.num_rows
    chosen = sorted({index * rows // count for index in range(count)}) if rows else ()
    return [read_trajectory(StoredTrajectory(path, row)) for row in chosen]


def read_trajectory(stored: StoredTrajectory) -> ScoredTrajectory:
    """One trajectory of a file."""
    return _scored(read_row(stored), stored.file)


def read_row(stored: StoredTrajectory) -> Row:
    """One trajectory as it is stored, as values of Python; its prompts are bytes, four an id."""
    metadata, row = opened(stored.file).metadata, stored.row
    for group in range(metadata.num_row_groups):
        size = metadata.row_group(group).num_rows
        if row < size:
            return next(
                _rows(_row_group(stored.file, stored.file.stat().st_mtime_ns, group).slice(row, 1), stored.file)
            )
        row -= size
    raise TrajectoryFileError(f"reading {stored.file}: it has no row {stored.row}. It was replaced: open it again.")


def find_text(path: Path, text: str) -> Iterator[tuple[int, list[int]]]:
    """Of each row group, its size and the rows of the file of which a message holds a text, in either case."""
    from pyarrow import compute

    first = 0
    for group in range(opened(path).num_row_groups):
        leaves = [f"messages.list.element.{name}" for name in ("content", "reasoning")]
        rows = read_table(path, leaves, group=group)["messages"].combine_chunks()
        said = [compute.struct_field(rows.flatten(), name) for name in ("content", "reasoning")]
        held = compute.or_(*(compute.match_substring(each, text, ignore_case=True) for each in said))
        yield len(rows), [first + row for row in compute.list_parent_indices(rows).filter(held).unique().to_pylist()]
        first += len(rows)


def read_figures(path: Path, columns: Sequence[str] | None = None) -> "pyarrow.Table":
    """Columns of one file, by default all but the nested ones."""
    return read_table(path, columns or [name for name in trajectory_schema().names if name not in NESTED])


def provenance_of(figures: "pyarrow.Table") -> Provenance | None:
    """What the trajectories of a file were sampled for and with; None: it was not given."""
    if not figures.num_rows:
        return None
    (first,) = figures.select([each.name for each in fields(Provenance)]).slice(0, 1).to_pylist()
    return None if first["model"] is None else decode(Provenance, first)


def write_credit(path: Path, step: Iterable[Credit]) -> None:
    """Write the credit of all trajectories of a step; replaces the file."""
    _write(path, credit_schema(), [[_plain(credit) for credit in step]])


def read_credit(path: Path) -> dict[str, Credit]:
    """The credit of a step, by trajectory id."""
    rows = read_table(path, schema=credit_schema()).to_pylist()
    return {row["trajectory"]: decode(Credit, row) for row in rows}


def part_file(path: Path, number: int) -> Path:
    """The file of a part; number 0 is the file itself."""
    return path.with_name(f"{path.stem}{PART}{number}{path.suffix}") if number else path


def start_file(path: Path) -> None:
    """Make the folder of a file, and remove what an earlier batch of this name has left."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for part in parts_of(path):
            part.unlink()


def parts_of(path: Path) -> list[Path]:
    """A file, if it exists, and those that hold further rows of it, by their numbers."""
    return [*([path] if path.is_file() else []), *parts_in(path.parent).get(path.name, ())]


def parts_in(folder: Path) -> dict[str, list[Path]]:
    """The files of a folder that hold further rows of others, by the names of those, in the order of their numbers."""
    parts = dict[str, list[Path]]()
    for part in sorted(folder.glob(f"*{PART}*"), key=lambda part: (len(part.name), part.name)):
        parts.setdefault(f"{part.name.rpartition(PART)[0]}{part.suffix}", []).append(part)
    return parts


def opened(path: Path, schema: "pyarrow.Schema | None" = None) -> "pyarrow.parquet.ParquetFile":
    """A file of trajectories, or of another schema, whose columns are what this version writes."""
    import pyarrow.parquet

    with _reading(path):
        file = pyarrow.parquet.ParquetFile(path, metadata=_metadata(path, path.stat().st_mtime_ns))
    if not file.schema_arrow.equals(schema or trajectory_schema()):
        raise TrajectoryFileError(
            f"reading {path}: its columns are not those of this version. Read it with the condensegrpo that wrote it."
        )
    return file


def read_table(
    path: Path,
    columns: Sequence[str] | None = None,
    *,
    group: int | None = None,
    schema: "pyarrow.Schema | None" = None,
) -> "pyarrow.Table":
    """Columns of a file, by default all, of one row group or of all."""
    file, names = opened(path, schema), None if columns is None else [*columns]
    with _reading(path):
        table = file.read(names) if group is None else file.read_row_group(group, names)
    for row in range(len(table)) if any(_gaps(table.to_struct_array())) else ():
        for column in _gaps(table.slice(row, 1).to_struct_array()):
            before = sum(file.metadata.row_group(number).num_rows for number in range(group or 0))
            raise TrajectoryFileError(
                f"reading {path}, row {before + row}: a list in the column {column[1:]} lacks a value. The file was "
                f"edited; sample the step again."
            )
    return table


def _gaps(values: "pyarrow.ChunkedArray", name: str = "") -> Iterator[str]:
    """The columns in which an element of a list is null where none may be, after a dot."""
    from pyarrow import compute, types

    if types.is_struct(values.type):
        named = {each.name for each in values.type} == PAIR
        for each in values.type:
            part = compute.struct_field(values, each.name)
            if named and part.null_count:
                yield name
            yield from _gaps(part, f"{name}.{each.name}")
    elif types.is_list(values.type):
        items = compute.list_flatten(values)
        if (items.null_count and name not in SPARSE) or (values.null_count and name in (".turns", ".turns.prompt_ids")):
            yield name
        yield from _gaps(items, name)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A block that reads a file: a fault of it becomes a ``TrajectoryFileError``."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError, TypeError, OverflowError) as error:
        cure = " Remove it." if path.suffix == ".parquet" else " Wanted a run folder or trajectories."
        raise TrajectoryFileError(f"reading {path}: it is not a whole Parquet file: {error}{cure}") from error
    except OSError as error:
        raise TrajectoryFileError(f"reading {path}: {error.strerror or error}.") from error


@lru_cache(maxsize=4)
def _row_group(path: Path, _modified: int, group: int) -> "pyarrow.Table":
    """A part of a file, kept for the next of its trajectories."""
    return read_table(path, group=group)


@lru_cache(maxsize=4)
def _metadata(path: Path, _modified: int) -> "pyarrow.parquet.FileMetaData":
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(path)


def _write(path: Path, schema: "pyarrow.Schema", groups: Iterable[Sequence[Row]]) -> None:
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    ids = [name for name in _leaves(schema) if name.endswith(("ids.list.element", "logprobs.list.element"))]
    encodings = {name: "BYTE_STREAM_SPLIT" for name in ids if "logprobs" in name}
    with pyarrow.parquet.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        use_dictionary=[name for name in _leaves(schema) if name not in ids],
        column_encoding=encodings,
        data_page_size=1 << 23,  # prompts repeat: the window of zstd is as wide
    ) as writer:
        for rows in groups:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    write_atomically(path, memoryview(sink.getvalue()))


def _row_groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    group, size = list[Row](), 0
    for row in rows:
        if group and (len(group) == ROWS or size + row["prompt_tokens"] > IDS):
            yield group
            group, size = [], 0
        group.append(row)
        size += row["prompt_tokens"]
    yield group


# the columns


@cache
def trajectory_schema() -> "pyarrow.Schema":
    """The columns of a trajectory file."""
    import pyarrow

    media = pyarrow.struct({"text": pyarrow.string(), "sha256": pyarrow.string(), "type": pyarrow.string()})
    message = {
        "role": pyarrow.string(),
        "content": pyarrow.string(),  # the text, in which media are named
        "reasoning": pyarrow.string(),
        "parts": pyarrow.list_(media),  # null: it is text alone
        "tool_calls": pyarrow.list_(_arrow(ToolCall)),
        "tool_call_id": pyarrow.string(),
        "name": pyarrow.string(),
    }
    figures = _columns(TrajectoryStats)
    texts = {name: pyarrow.string() for name in ("question", "ground_truth", "answer", "detail")}
    return pyarrow.schema(
        {
            **_columns(Provenance),
            **{"turn_count" if name == "turns" else name: kind for name, kind in figures.items()},
            **texts,
            "outcome": pyarrow.float64(),
            "failure": _arrow(PluginFailure),
            "turn_rewards": pyarrow.list_(pyarrow.float64()),  # of the score
            "rejected_texts": pyarrow.list_(_arrow(Rejected)),
            "messages": pyarrow.list_(pyarrow.struct(message)),
            "turns": pyarrow.list_(_arrow(Turn)),
        }
    )


@cache
def credit_schema() -> "pyarrow.Schema":
    """The columns of a credit file."""
    import pyarrow

    return pyarrow.schema(_columns(Credit))


def _columns(kind: type) -> dict[str, "pyarrow.DataType"]:
    """The columns of a dataclass."""
    import pyarrow

    index = pyarrow.int32()
    small = {name: index if name == "reply" else pyarrow.list_(index) for name in INDICES}
    hints = get_type_hints(kind)
    return {each.name: small.get(each.name) or _arrow(hints[each.name]) for each in fields(kind)}


def _arrow(kind: Any) -> "pyarrow.DataType":  # noqa: ANN401  a type or a typing construct
    """The type of a column: a mapping is a list of names and values, which more readers know than maps."""
    import pyarrow

    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _arrow(next(each for each in arguments if each is not NoneType))
    if origin in (tuple, Sequence):
        return pyarrow.list_(_arrow(arguments[0]))
    if origin is Mapping:
        return pyarrow.list_(pyarrow.struct({"name": pyarrow.string(), "value": _arrow(arguments[1])}))
    if isinstance(kind, type) and is_dataclass(kind):
        return pyarrow.struct(_columns(kind))
    numbers = {int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    return numbers.get(kind, pyarrow.string())


def _leaves(schema: "pyarrow.Schema") -> list[str]:
    """The paths of the columns in a file."""
    import pyarrow

    def below(path: str, kind: "pyarrow.DataType") -> Iterator[str]:
        if pyarrow.types.is_struct(kind):
            for each in kind:
                yield from below(f"{path}.{each.name}", each.type)
        elif pyarrow.types.is_list(kind):
            yield from below(f"{path}.list.element", kind.value_type)
        else:
            yield path

    return [leaf for each in schema for leaf in below(each.name, each.type)]


# rows


def row_of(scored: ScoredTrajectory) -> Row:
    """The row of a trajectory, without what it was sampled with."""
    trajectory, score = scored.trajectory, scored.score
    messages = _Messages()
    turns = [
        _plain(turn)
        | {
            "prompt_ids": _ids(turn.prompt_ids),
            "context": [messages.index(message) for message in turn.context],
            "reply": messages.add(turn.reply),
            "observations": [messages.add(message) for message in turn.observations],
        }
        for turn in trajectory.turns
    ]
    return {
        **_plain(scored.figures),
        "turn_count": len(turns),
        **{name: _plain(getattr(trajectory, name)) for name in ("question", "ground_truth", "answer", "detail")},
        "outcome": trajectory.outcome,
        "failure": _plain(trajectory.failure),
        "turn_rewards": score.turn_rewards,
        "rejected_texts": [_plain(text) | {"prompt_ids": _ids(text.prompt_ids)} for text in trajectory.rejected],
        "messages": messages.rows,
        "turns": turns,
    }


class _Messages:
    """The messages of a trajectory, each once, in the order in which they came up."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._known: dict[int | Message, int] = {}  # by identity, and the newest of equal messages

    def add(self, message: Message) -> int:
        """The index of a message that is new, though it may equal an earlier one."""
        parts = None if isinstance(message.content, str) else [_plain(part) for part in message.content]
        self.rows.append({**_plain(message), "content": message.text, "parts": parts})
        self._known[id(message)] = self._known[message] = len(self.rows) - 1
        return len(self.rows) - 1

    def index(self, message: Message) -> int:
        """The index of a message of a prompt."""
        found = self._known.get(id(message))
        found = self._known.get(message) if found is None else found
        return self.add(message) if found is None else found


def _plain(value: Any) -> Any:  # noqa: ANN401  any value of a dataclass
    """A value as pyarrow takes it."""
    kind = type(value)
    if value is None or kind in PLAIN:
        return value
    if isinstance(value, str):
        return value if value.isascii() else encodable(value)
    if kind is tuple or kind is list:
        return value if not value or isinstance(value[0], int | float | Message) else [_plain(each) for each in value]
    if is_dataclass(kind):
        # nested messages and prompts are replaced by the caller
        named = fields_of(value).items()
        return {name: _plain(each) for name, each in named if type(each) not in (Message, SharedSequence)}
    if isinstance(value, Mapping):
        return [{"name": _plain(name), "value": _plain(each)} for name, each in value.items()]
    raise TypeError(f"{kind.__name__} cannot be stored")


def _ids(ids: Sequence[int]) -> Any:  # noqa: ANN401  an array of numpy
    import numpy

    return numpy.frombuffer(packed_ids(ids), dtype=numpy.int32)


def _rows(table: "pyarrow.Table", path: Path) -> Iterator[Row]:
    """The rows of a table of trajectories from a file; the prompts of turns are arrays."""
    with _reading(path):
        yield from _unpacked(table)


def _unpacked(table: "pyarrow.Table") -> Iterator[Row]:
    import numpy
    import pyarrow
    from pyarrow import compute

    column = table["turns"].combine_chunks()
    counts, turns = compute.list_value_length(column).to_pylist(), column.flatten()
    prompts = compute.struct_field(turns, "prompt_ids")  # nearly all that there is: not through Python's numbers
    lengths, ids = compute.list_value_length(prompts).to_pylist(), numpy.from_dlpack(prompts.flatten()).tobytes()
    names = [each.name for each in turns.type if each.name != "prompt_ids"]
    others = pyarrow.StructArray.from_arrays([compute.struct_field(turns, name) for name in names], names).to_pylist()
    ends = accumulate(4 * length for length in lengths)
    following = (
        {"prompt_ids": ids[end - 4 * length : end]} | turn
        for turn, length, end in zip(others, lengths, ends, strict=True)
    )
    for row, count in zip(table.drop_columns(["turns"]).to_pylist(), counts, strict=True):
        yield row | {"turns": [next(following) for _ in range(count)]}


@contextmanager
def unedited(path: Path, trajectory: object) -> Iterator[None]:
    """A block that decodes a trajectory of a file: values that were not written so become a ``TrajectoryFileError``."""
    try:
        yield
    except (ValueError, IndexError, TypeError, OverflowError) as error:
        raise TrajectoryFileError(
            f"reading {path}, trajectory {trajectory}: {error}. The file was edited; sample the step again."
        ) from error


def _scored(row: Row, path: Path) -> ScoredTrajectory:
    """The trajectory of a row."""
    with unedited(path, row["id"]):
        figures = figures_in(row)
        messages = [_message(each) for each in row["messages"]]
        last: SharedSequence[int] | None = None  # the prompt before, with its output
        for turn in row["turns"]:
            prompt = _prompt(turn["prompt_ids"], last)
            last = prompt.extended(turn["output_ids"])
            context, turn["prompt_ids"] = turn["context"], prompt
            begins = context == [*range(len(context))]
            turn["context"] = SharedSequence(messages, len(context)) if begins else tuple(messages[k] for k in context)
            turn["reply"] = messages[turn["reply"]]
            turn["observations"] = tuple(messages[k] for k in turn["observations"])
        named = {each.name: row[each.name] for each in fields(Trajectory)} | {"rejected": row["rejected_texts"]}
        trajectory = decode(Trajectory, named)
        score = {each.name: row[each.name] for each in fields(Score)}
        return ScoredTrajectory(trajectory=trajectory, score=decode(Score, score), figures=figures)


def named(pairs: Sequence[Row]) -> dict[str, Any]:
    """The mapping that a list of names and values stands for."""
    return {each["name"]: each["value"] for each in pairs}


def figures_in(row: Row) -> TrajectoryStats:
    """The figures of a row."""
    named = {each.name: row[each.name] for each in fields(TrajectoryStats) if each.name != "turns"}
    return decode(TrajectoryStats, named | {"turns": row["turn_count"]})


def _prompt(ids: bytes, last: SharedSequence[int] | None) -> SharedSequence[int]:
    """The ids of a prompt; they share the storage of the last prompt and output if they continue them."""
    prompt = shared_ids(array("I", ids))
    return last.extended(prompt[len(last) :]) if last is not None and prompt.continues(last) else prompt


def _message(row: Row) -> Message:
    parts = tuple(
        TextPart(text=each["text"]) if each["sha256"] is None else MediaPart(sha256=each["sha256"], type=each["type"])
        for each in row.pop("parts") or ()
    )
    return decode(Message, row | {"content": parts} if parts else row)
