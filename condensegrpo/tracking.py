"""Where metrics go. ``metrics.jsonl`` of the run folder is always written; other trackers are plug-ins beside it."""

from collections.abc import Mapping
from pathlib import Path

from condensegrpo.storage import append_metrics


class JsonlTracker:
    """Appends ``{"step": …, name: value, …}`` to a file, one line a call, handed to the system at once."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step.

        Raises:
            RunError: the disk is full or the file cannot be written.
        """
        append_metrics(self._path, step, metrics)

    def close(self) -> None:
        """Nothing is held between calls."""
