"""Versioned lines of JSON that hold dataclasses: the lines of trajectory and credit files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from condensegrpo.core.errors import DataError, TrajectoryFileError
from condensegrpo.storage.codec import decode, dump_line
from condensegrpo.storage.files import read_lines

VERSION = 3  # of the lines that are written; 2, with long ids and without a provenance, and 1 are read too

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
    return [_record(kind, line, f"reading {path}, line {number}") for number, line in lines], problems


def _record(kind: type[T], line: object, doing: str) -> T:
    if not isinstance(line, dict):
        raise TrajectoryFileError(f"{doing}: found {type(line).__name__}, wanted an object.")
    fields = {key: value for key, value in line.items() if key != "version"}
    version = line.get("version")
    if version not in (1, 2, VERSION):
        raise TrajectoryFileError(
            f"{doing}: found version {version!r}, wanted 1 to {VERSION}. Read it with the condensegrpo that wrote it."
        )
    try:
        return decode(kind, _converted_from_version_1(fields) if version == 1 else fields)
    except ValueError as error:
        raise TrajectoryFileError(
            f"{doing}: {error}. The file was edited or damaged; remove the line or sample the step again."
        ) from error


def _converted_from_version_1(record: dict[str, object]) -> dict[str, object]:
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
    return record


def _objects(value: object, key: str) -> Iterator[dict[str, object]]:
    """The JSON objects in the list under a key, if the value is an object and has such a list."""
    items = value.get(key) if isinstance(value, dict) else None
    yield from (item for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
