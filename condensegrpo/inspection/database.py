"""The index file: its tables, rows as records, and the lines of a trajectory file that are new since the last read.

It is a cache. One that is damaged or of another version is removed and built again. Standard library only.
"""

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Any, BinaryIO, NamedTuple, get_origin, get_type_hints
from weakref import finalize
from zlib import crc32

from condensegrpo.core.errors import CondenseError, DataError
from condensegrpo.core.scored_trajectory import TrajectoryStats
from condensegrpo.core.trajectory import StopReason
from condensegrpo.inspection.batches import TrajectoryBatch
from condensegrpo.inspection.records import IndexedTrajectory, LineSpan, natural
from condensegrpo.storage.codec import decode, dump_line
from condensegrpo.storage.files import user_cache
from condensegrpo.storage.trajectories import VERSION, Credit, read_trajectory

PART_SECONDS = 0.2  # of reading, after which a part is complete
TAIL = 4096  # bytes before the end of what was read that tell whether a file was replaced
NAME = ".inspection.sqlite"
PAGE = 1000  # rows that are read at a time
FIGURES = get_type_hints(TrajectoryStats)  # a column for each
CONTENT = f"{', '.join(FIGURES)}, question, ground_truth, answer"
COLUMNS = f"line, start, size, {CONTENT}, advantages, weights, handling"
TABLES = f"""
CREATE TABLE files (
    file INTEGER PRIMARY KEY, name TEXT UNIQUE, size, modified, end, lines, tail, problem, provenance,
    count DEFAULT 0, success, signal, credit);
CREATE TABLE trajectories (file INTEGER, natural, {COLUMNS}, taught, PRIMARY KEY (file, start));
CREATE INDEX by_group ON trajectories (file, natural, sample, id);
CREATE INDEX by_id ON trajectories (file, id);
CREATE INDEX by_problem ON trajectories (problem_id);
"""
INDEX_VERSION = crc32(TABLES.encode()) >> 1  # an index of other tables is built again


class KnownFile(NamedTuple):
    """What was read of a file, to tell one that grew from one that was replaced."""

    size: int = 0
    modified: int = 0  # ns
    end: int = 0  # of the last line that was read, in bytes
    lines: int = 0
    tail: bytes = b""  # hash of what stands before that end


class LineContent(NamedTuple):
    """What the index takes from a line."""

    figures: TrajectoryStats
    question: str | None
    ground_truth: str | None
    answer: str | None


class NewLine(NamedTuple):
    """One trajectory and its place in its file."""

    line: int  # from 1
    start: int
    size: int
    content: LineContent


class NewLines(NamedTuple):
    """A part of what is new."""

    lines: tuple[NewLine, ...]
    known: KnownFile  # the file, this part included
    replaces: bool  # the file was replaced: what was read of it before is void
    problem: str | None  # a last line that is cut off
    provenance: str | None  # JSON, of the last line; None: not known


def read_new_lines(path: Path, known: KnownFile) -> Iterator[NewLines]:
    """The lines after those that are known, in parts; nothing if the file did not change."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            current = known._replace(size=status.st_size, modified=status.st_mtime_ns)
            if current == known:
                return
            is_longer = known.end > 0 and status.st_size > known.size
            replaces = not (is_longer and _tail(file, known.end) == known.tail)  # else it goes on where it ended
            known = KnownFile() if replaces else known
            file.seek(known.end)
            for part in _parts(path, file, known):
                last = part.problem is not None or part.known.end >= status.st_size
                size, modified = (status.st_size, status.st_mtime_ns) if last else (part.known.end, 0)
                now = part.known._replace(size=size, modified=modified, tail=_tail(file, part.known.end))
                yield part._replace(known=now, replaces=replaces)
                replaces = False
    except OSError as error:
        raise DataError(f"reading {path}: {error.strerror}.") from error


def _parts(path: Path, file: BinaryIO, known: KnownFile) -> Iterator[NewLines]:
    lines: list[NewLine] = []
    problem = provenance = None
    due = time.monotonic() + PART_SECONDS
    for line in file:
        number, size = known.lines + 1, len(line)
        if line == b"\n" and known.end > 0 and os.pread(file.fileno(), 1, known.end - 1) != b"\n":
            known = known._replace(end=known.end + size)  # the end of a line that was read before it had one
            continue
        if not line.endswith(b"\n") and not _is_json(line):
            problem = (
                f"line {number} is cut off after {size} bytes, as if the run was interrupted while writing it; "
                f"{known.lines} lines before it were read"
            )
            break
        try:
            content, provenance = _read(path, line, number)
        except CondenseError:
            yield NewLines(tuple(lines), known, False, None, provenance)
            raise
        lines.append(NewLine(number, known.end, size, content))
        known = known._replace(end=known.end + size, lines=number)
        if time.monotonic() > due:
            yield NewLines(tuple(lines), known, False, None, provenance)
            lines, due = [], time.monotonic() + PART_SECONDS
    yield NewLines(tuple(lines), known, False, problem, provenance)


def _read(path: Path, line: bytes, number: int) -> tuple[LineContent, str | None]:
    """What the index takes from a line, and its provenance as JSON; None: it has none.

    No ``Trajectory`` is built: that is 15 times as fast, and the first look at a file of 2 GB waits for it.
    """
    try:
        record = json.loads(line)
        if record["version"] != VERSION:
            raise ValueError("another version")
        known, trajectory = record.get("provenance"), record["trajectory"]
        texts = (trajectory.get(name) for name in LineContent._fields[1:])
        content = LineContent(decode(TrajectoryStats, record["figures"]), *texts)
    except (ValueError, KeyError, TypeError, AttributeError):
        read_trajectory(path, line, number)  # names the fault
        raise
    return content, None if known is None else dump_line(known)


def _tail(file: BinaryIO, end: int) -> bytes:
    """A hash of what stands before a byte of a file."""
    return sha256(os.pread(file.fileno(), min(end, TAIL), max(0, end - TAIL))).digest()


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


class Database:
    """The tables of one index file. Any thread may use it."""

    def __init__(self, folder: Path) -> None:
        """Open the index file of a folder, or make it."""
        self._lock = RLock()
        self._connection, self.file = _connected(folder)  # the file; None: in memory
        finalize(self, self._connection.close)  # Python 3.13 warns where it has to

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        with self._lock:
            return self._connection.execute(query, [*map(_storable, values)]).fetchall()

    def pages(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, read as they are needed."""
        with self._lock:
            cursor = self._connection.execute(query, values)
        page: list[tuple[Any, ...]] = [()]
        while page:
            with self._lock:
                page = cursor.fetchmany(PAGE)
            yield from page

    def key(self, name: str) -> int:
        """The number of a file."""
        known = self.rows("SELECT file FROM files WHERE name = ?", name)
        if not known:
            with self._lock, self._connection:
                self._connection.execute("INSERT OR IGNORE INTO files (name) VALUES (?)", (name,))
            known = self.rows("SELECT file FROM files WHERE name = ?", name)
        return int(known[0][0])

    def add(self, key: int, new: NewLines) -> None:
        """Add a part of a file."""
        rows = [(key, *line[:3], *_columns(line.content)) for line in new.lines]
        correct = sum(line.content.figures.correct for line in new.lines)
        with self._lock, self._connection:
            if new.replaces:
                self._connection.execute("DELETE FROM trajectories WHERE file = ?", (key,))
                self._connection.execute("UPDATE files SET count = 0, success = 0 WHERE file = ?", (key,))
            self._connection.executemany(
                f"INSERT OR REPLACE INTO trajectories (file, line, start, size, natural, {CONTENT}) "
                f"VALUES (?, ?, ?, ?, ?, {', '.join('?' * (len(FIGURES) + 3))})",
                rows,
            )
            self._connection.execute(
                "UPDATE files SET size = ?, modified = ?, end = ?, lines = ?, tail = ?, problem = ?, "
                "provenance = ?, credit = NULL WHERE file = ?",
                (*new.known, new.problem, new.provenance, key),
            )
            self._connection.execute(
                "UPDATE files SET success = (success * count + ?) / max(count + ?, 1), count = count + ? "
                "WHERE file = ?",
                (correct, len(rows), len(rows), key),
            )

    def add_credit(self, key: int, credit: Mapping[str, Credit], modified: int) -> None:
        """Add the credit of a file of that time."""
        rows = [
            (
                *map(json.dumps, (each.advantages, each.weights)),
                each.handling,
                any(each.advantages),
                key,
                _storable(name),
            )
            for name, each in credit.items()
        ]
        with self._lock, self._connection:
            self._connection.executemany(
                "UPDATE trajectories SET advantages = ?, weights = ?, handling = ?, taught = ? "
                "WHERE file = ? AND id = ?",
                rows,
            )
            self._connection.execute("UPDATE files SET credit = ? WHERE file = ?", (modified, key))
            self.summarise(key)

    def summarise(self, key: int) -> None:
        """Count the trajectories of a file, their mean correctness and the share of groups with a signal."""
        with self._lock, self._connection:
            self._connection.execute(
                "UPDATE files SET (count, success) = "
                "(SELECT count(*), avg(correct) FROM trajectories WHERE file = files.file), "
                "signal = (SELECT avg(has_signal) FROM (SELECT max(taught) AS has_signal FROM trajectories "
                "WHERE file = ? AND advantages IS NOT NULL GROUP BY group_id)) WHERE file = ?",
                (key, key),
            )

    def forget_all_but(self, names: Iterable[str]) -> None:
        """Remove the files that are not named."""
        kept = set(names)
        gone = [(key,) for key, name in self.rows("SELECT file, name FROM files") if name not in kept]
        if gone:
            with self._lock, self._connection:
                for table in ("trajectories", "files"):
                    self._connection.executemany(f"DELETE FROM {table} WHERE file = ?", gone)

    def close(self) -> None:
        """Close the index file."""
        with self._lock:
            self._connection.close()


def record(batch: TrajectoryBatch, number: int, row: tuple[Any, ...]) -> IndexedTrajectory:
    """The trajectory of a row of ``COLUMNS``, which is that ``number`` in its batch."""
    (line, start, size), rest = row[:3], row[3:]
    figures = TrajectoryStats(**dict(zip(FIGURES, map(_figure, FIGURES.values(), rest), strict=False)))
    question, ground_truth, answer, advantages, weights, handling = rest[len(FIGURES) :]
    credit = None
    if advantages is not None:
        numbers = {"advantages": tuple(json.loads(advantages)), "weights": tuple(json.loads(weights))}
        credit = Credit(trajectory=figures.id, handling=handling, **numbers)
    return IndexedTrajectory(
        number=number,
        step=batch.number,
        evaluation=batch.evaluation,
        figures=figures,
        question=restored(question),
        ground_truth=restored(ground_truth),
        answer=restored(answer),
        credit=credit,
        span=LineSpan(file=batch.file, line=line, start=start, size=size),
    )


def _columns(content: LineContent) -> Iterator[object]:
    """The values of ``natural``, the sort key of the group, and ``CONTENT``."""
    figures, *texts = content
    yield _storable(natural(figures.group_id))
    for name in FIGURES:
        value = getattr(figures, name)
        yield dump_line(value) if isinstance(value, Mapping | tuple) else _storable(value)
    yield from map(_storable, texts)


def _figure(kind: Any, value: Any) -> Any:  # noqa: ANN401  a type of a figure, and its column
    """A figure from its column."""
    if get_origin(kind) is tuple:
        return tuple(json.loads(value))
    if get_origin(kind) is Mapping:
        return json.loads(value)
    return kind(value) if kind in (bool, StopReason) else restored(value)


def _storable(value: object) -> object:
    """Text as SQLite can hold it: as bytes if it has a lone surrogate, which a byte-level tokenizer can produce."""
    if not isinstance(value, str) or value.isascii():
        return value
    encoded = value.encode("utf-8", "surrogatepass")
    return value if encoded.decode("utf-8", "ignore") == value else encoded


def restored(value: Any) -> Any:  # noqa: ANN401  a column
    """A value as it was before ``_storable``."""
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value


def _connected(folder: Path) -> tuple[sqlite3.Connection, Path | None]:
    """The index file in the folder, in the user's cache where that cannot be written, or else one in memory (None)."""
    cache, name = user_cache(), f"inspection-{sha256(os.fsencode(folder)).hexdigest()[:16]}.sqlite"
    for path in (folder / NAME, cache / name):
        with suppress(OSError, sqlite3.Error):
            if path.parent == cache:
                cache.mkdir(parents=True, exist_ok=True)
            try:
                return _prepared(path), path
            except sqlite3.DatabaseError:  # damaged, or it cannot be written
                path.unlink()
                return _prepared(path), path
    return _prepared(":memory:"), None


def _prepared(path: Path | str) -> sqlite3.Connection:
    """A connection whose tables exist and can be written."""
    connection = sqlite3.connect(path, timeout=10, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = OFF")  # what a crash of the machine damages is built again
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        with connection:
            if version != INDEX_VERSION:
                for table in ("files", "trajectories"):
                    connection.execute(f"DROP TABLE IF EXISTS {table}")
                connection.executescript(TABLES)
            connection.execute(f"PRAGMA user_version = {INDEX_VERSION}")  # fails where it cannot be written
    except sqlite3.Error:
        connection.close()
        raise
    return connection
