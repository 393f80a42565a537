"""Versioned lines of JSON that hold dataclasses: the lines of trajectory and credit files."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from condensegrpo.core.errors import DataError, TrajectoryFileError
from condensegrpo.storage.codec import decode, dump_line
from condensegrpo.storage.files import read_lines
from condensegrpo.storage.stored_trajectory import restore

VERSION = 1  # of the lines

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
    if line.get("version") != VERSION:
        raise TrajectoryFileError(
            f"{doing}: found version {line.get('version')!r}, wanted {VERSION}. Read it with the condensegrpo that "
            f"wrote it."
        )
    try:
        if isinstance(trajectory := fields.get("trajectory"), dict):
            restore(trajectory)
        return decode(kind, fields)
    except ValueError as error:
        raise TrajectoryFileError(
            f"{doing}: {error}. The file was edited or damaged; remove the line or sample the step again."
        ) from error
