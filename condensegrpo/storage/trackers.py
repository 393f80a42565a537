"""The metrics file of a run, ``metrics.jsonl``: written line by line and read back. It is a tracker too."""

from collections.abc import Mapping
from pathlib import Path

from condensegrpo.core.errors import DataError
from condensegrpo.storage.codec import decode, dump_line
from condensegrpo.storage.files import append_line, read_lines


class JsonlTracker:
    """Appends ``{"step": …, name: value, …}`` to a file, one line a call, handed to the system at once."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step.

        Raises:
            RunError: the disk is full or the file cannot be written.
        """
        append_line(self._path, dump_line({"step": step, **metrics}))

    def close(self) -> None:
        """Nothing is held between calls."""


def read_metrics(path: Path) -> tuple[dict[str, float], ...]:
    """The lines of a metrics file in order, without a last line that is cut off; none if the file is missing.

    Raises:
        DataError: another line is damaged.
    """
    if not path.is_file():
        return ()
    metrics = []
    for number, line in read_lines(path)[0]:
        try:
            metrics.append(decode(dict[str, float], line))
        except ValueError as error:
            raise DataError(f"reading {path}, line {number}: {error}. Remove the line.") from error
    return tuple(metrics)
