"""What was written to a trajectory file since it was read last."""

import json
import os
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple

from condensegrpo.core.errors import CondenseError, DataError
from condensegrpo.core.scored_trajectory import TrajectoryFigures
from condensegrpo.storage.codec import decode, dump_line
from condensegrpo.storage.records import VERSION
from condensegrpo.storage.trajectories import read_trajectory

PART_SECONDS = 0.2  # of reading, after which a part is complete
TAIL = 4096  # bytes before the end of what was read that tell whether a file was replaced


class KnownFile(NamedTuple):
    """What was read of a file, to tell one that grew from one that was replaced."""

    size: int = 0
    modified: int = 0  # ns
    end: int = 0  # of the last line that was read, in bytes
    lines: int = 0
    tail: bytes = b""  # hash of what stands before that end


class LineContent(NamedTuple):
    """What the index takes from a line."""

    figures: TrajectoryFigures
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
    """The lines after those that are known, in parts; nothing if the file did not change.

    Raises:
        TrajectoryFileError: a line is damaged; names file and line.
        DataError: the file cannot be read.
    """
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

    Raises:
        TrajectoryFileError: the line is damaged or of another version; names file and line.
    """
    try:
        record = json.loads(line)
        if record["version"] != VERSION:
            raise ValueError("another version")
        known, trajectory = record.get("provenance"), record["trajectory"]
        texts = (trajectory.get(name) for name in LineContent._fields[1:])
        content = LineContent(decode(TrajectoryFigures, record["figures"]), *texts)
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
