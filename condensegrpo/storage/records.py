"""Versioned lines of JSON that hold dataclasses: the lines of trajectory and credit files."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from condensegrpo.core.errors import DataError, TrajectoryFileError
from condensegrpo.storage.codec import decode, dump_line
from condensegrpo.storage.files import read_lines
from condensegrpo.storage.version_1 import converted_from_version_1

VERSION = 2  # of the lines that are written; lines of version 1 are read too

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
    if version not in (1, VERSION):
        raise TrajectoryFileError(
            f"{doing}: found version {version!r}, wanted {VERSION} or 1. Read it with the condensegrpo that wrote it."
        )
    try:
        return decode(kind, converted_from_version_1(fields) if version == 1 else fields)
    except ValueError as error:
        raise TrajectoryFileError(
            f"{doing}: {error}. The file was edited or damaged; remove the line or sample the step again."
        ) from error
