"""A tracker without a connection: `trackers=[tests/failing_tracker.py:Failing]` in a run."""

from collections.abc import Mapping

from condensegrpo.core.protocols.tracker import RunStart, StartedRun


class Failing:
    """Fails to open its run; nothing else of it is called but ``close``."""

    def start(self, run: RunStart) -> StartedRun:
        raise RuntimeError("no connection")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise AssertionError("logged to a run that was not opened")

    def close(self) -> None:
        """Nothing."""
