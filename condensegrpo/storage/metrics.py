"""The metrics file of a run: one line of JSON for each step or evaluation."""

from collections.abc import Mapping
from pathlib import Path

from condensegrpo.core.errors import DataError
from condensegrpo.storage.codec import decode
from condensegrpo.storage.files import read_lines


def read_metrics(path: Path) -> tuple[dict[str, float], ...]:
    """The lines of a metrics file in order, without a last line that is cut off; none if the file is missing.

    Raises:
        DataError: another line is damaged.
    """
    if not path.is_file():
        return ()
    lines, _ = read_lines(path)
    return tuple(_metrics(line, f"reading {path}, line {number}") for number, line in lines)


def _metrics(line: object, doing: str) -> dict[str, float]:
    try:
        return dict(decode(Mapping[str, float], line))  # type: ignore[type-abstract]  # a typing construct as a value
    except ValueError as error:
        raise DataError(f"{doing}: {error}. Remove the line.") from error
