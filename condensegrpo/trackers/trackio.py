"""The tracker ``trackio``: metrics and tables into a local SQLite store, or to a Hugging Face Space."""

import importlib
import io
import secrets
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from condensegrpo.core.packages import check_installed
from condensegrpo.core.protocols.tracker import RunStart, StartedRun
from condensegrpo.core.table import Table


class TrackioTracker:
    """Logs to Trackio: ``trackio show --project condensegrpo`` shows its local store (``TRACKIO_DIR``)."""

    def __init__(self, project: str = "condensegrpo", space: str | None = None) -> None:
        """Log to a project, of the local store or of a Hugging Face Space."""
        self._project, self._space = project, space
        self._trackio: Any = None  # the library
        self._run: Any = None

    @staticmethod
    def check_options(**options: object) -> None:
        """Refuse to start without the package."""
        check_installed("trackio", extra="trackio", instead="take the tracker out of the configuration")

    def start(self, run: RunStart) -> StartedRun:
        """Open a run, or continue it by its name, which therefore ends in random digits."""
        self._trackio = trackio = importlib.import_module("trackio")
        name = run.identity or f"{run.name}-{secrets.token_hex(2)}"
        with redirect_stdout(io.StringIO()):  # it prints how to open its page
            self._run = trackio.init(
                project=self._project,
                name=name,
                space_id=self._space,
                config=dict(run.config),
                resume="allow" if run.identity else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return StartedRun(identity=name, location=self._space or f"trackio show --project {self._project}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def log_table(self, step: int, name: str, table: Table) -> None:
        """Record a table."""
        rows = [list(row) for row in table.rows]
        self._run.log({name: self._trackio.Table(columns=list(table.columns), data=rows)}, step=step)

    def close(self) -> None:
        """Send what is still waiting."""
        if self._run is not None:
            with redirect_stdout(io.StringIO()):
                self._trackio.finish()
