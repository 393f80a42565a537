"""The tracker ``tensorboard`` writes event files: scalars, the configuration and tables as Markdown texts."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from condensegrpo.core.packages import check_installed
from condensegrpo.core.protocols.tracker import RunStart, StartedRun
from condensegrpo.core.table import Table, markdown


class TensorboardTracker:
    """Writes TensorBoard event files: ``tensorboard --logdir FOLDER`` shows them."""

    def __init__(self, folder: str | None = None) -> None:
        """Write into a folder; by default ``tensorboard`` in the run's folder."""
        self._folder = folder
        self._writer: Any = None  # a SummaryWriter

    @staticmethod
    def check_options(**options: object) -> None:
        """Refuse to start without the package."""
        check_installed("tensorboard", extra="tensorboard", instead="take the tracker out of the configuration")

    def start(self, run: RunStart) -> StartedRun:
        """Open an event file; what another one holds of steps that are taken again is hidden."""
        folder = Path(self._folder) if self._folder else run.folder / "tensorboard"
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(folder), purge_step=run.step + 1 if run.identity else None)
        rows = tuple((key, str(value)) for key, value in run.config.items())
        self._writer.add_text("config", markdown(Table(columns=("key", "value"), rows=rows)), run.step)
        return StartedRun(identity=folder.name, location=str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_table(self, step: int, name: str, table: Table) -> None:
        """Record a table as a text."""
        self._writer.add_text(name, markdown(table), step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
