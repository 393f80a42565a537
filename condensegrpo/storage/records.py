"""Versioned lines of JSON that hold dataclasses: the lines of trajectory and credit files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from condensegrpo.core.errors import DataError, TrajectoryFileError
from condensegrpo.core.trajectory import Span, SpanStatus
from condensegrpo.storage.codec import decode, dump_line
from condensegrpo.storage.files import read_lines
from condensegrpo.storage.stored_trajectory import restore

VERSION = 4  # of the lines that are written; 3, with whole prompts and contexts in every turn, 2 and 1 are read too

T = TypeVar("T")


def record_line(fields: Mapping[str, object]) -> str:
    """One line of a file, without its newline."""
    return dump_line({"version": VERSION, **fields})


def read_records(kind: type[T], path: Path) -> tuple[list[T], tuple[str, ...]]:
    """A value of the dataclass ``kind`` for every line, and what is wrong with a cut-off last line.

    Raises:
        TrajectoryFileError: the file is missing, or a line is damaged or of another version; names file and line.
    """
    try:
        lines, problems = read_lines(path)
    except DataError as error:
        raise TrajectoryFileError(str(error)) from error
    return [read_record(kind, line, f"reading {path}, line {number}") for number, line in lines], problems


def read_record(kind: type[T], line: object, doing: str) -> T:
    """A value of the dataclass ``kind`` for the parsed JSON of one line.

    Raises:
        TrajectoryFileError: the line is damaged or of another version; begins with ``doing``.
    """
    if not isinstance(line, dict):
        raise TrajectoryFileError(f"{doing}: found {type(line).__name__}, wanted an object.")
    fields = {key: value for key, value in line.items() if key != "version"}
    version = line.get("version")
    if not isinstance(version, int) or version not in range(1, VERSION + 1):
        raise TrajectoryFileError(
            f"{doing}: found version {version!r}, wanted 1 to {VERSION}. Read it with the condensegrpo that wrote it."
        )
    try:
        if version == 1:
            _convert_from_version_1(fields)
        if version < VERSION:
            _convert_from_version_3(fields)
        elif isinstance(trajectory := fields.get("trajectory"), dict):
            restore(trajectory)
        return decode(kind, fields)
    except ValueError as error:
        raise TrajectoryFileError(
            f"{doing}: {error}. The file was edited or damaged; remove the line or sample the step again."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnitSpan:
    """What versions before 4 hold for each unit of a condensation."""

    turn: int
    status: SpanStatus
    tokens: int


def _convert_from_version_3(record: dict[str, object]) -> None:
    """Join the spans of units that follow each other with one status; changes the parsed JSON in place.

    Raises:
        ValueError: a span is damaged.
    """
    for index, turn in enumerate(_objects(record.get("trajectory"), "turns")):
        declared, place = turn.get("condensation"), f"trajectory.turns[{index}].condensation.spans"
        if isinstance(declared, dict) and "spans" in declared:
            runs = groupby(decode(tuple[_UnitSpan, ...], declared["spans"], place), key=attrgetter("status"))
            declared["spans"] = tuple(_joined(status, tuple(run)) for status, run in runs)


def _joined(status: SpanStatus, run: tuple[_UnitSpan, ...]) -> Span:
    tokens = sum(unit.tokens for unit in run)
    return Span(first=run[0].turn, last=run[-1].turn, units=len(run), status=status, tokens=tokens)


def _convert_from_version_1(record: dict[str, object]) -> None:
    """The fields of a line of version 1 as version 2 names them; changes the parsed JSON in place.

        trajectory.id  7-a-3                                     ─▶   sample  3, of an id that ends otherwise 0
        trajectory.turns[].condensation.spans[].fate             ─▶   status
        trajectory.turns[].turn_rewards["tool_attempts"]  2.0    ─▶   tool_attempts   2    likewise tool_successes

    What is damaged stays so: the decoder names the fault.
    """
    trajectory = record.get("trajectory")
    if isinstance(trajectory, dict) and isinstance(trajectory.get("id"), str):
        number = trajectory["id"].rpartition("-")[2]
        trajectory["sample"] = int(number) if number.isdecimal() else 0
    for turn in _objects(trajectory, "turns"):
        for span in _objects(turn.get("condensation"), "spans"):
            if "fate" in span:
                span["status"] = span.pop("fate")
        rewards = turn.get("turn_rewards")
        for name in ("tool_attempts", "tool_successes"):
            if isinstance(rewards, dict) and isinstance(rewards.get(name), int | float):
                turn[name] = int(rewards.pop(name))


def _objects(value: object, key: str) -> Iterator[dict[str, object]]:
    """The JSON objects in the list under a key, if the value is an object and has such a list."""
    items = value.get(key) if isinstance(value, dict) else None
    yield from (item for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
