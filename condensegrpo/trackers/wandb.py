"""The tracker ``wandb``: metrics and tables to Weights & Biases, or offline into the run's folder."""

import importlib
import os
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from condensegrpo.core.packages import check_installed
from condensegrpo.core.protocols.tracker import RunStart, StartedRun
from condensegrpo.core.table import Table


class WandbTracker:
    """Sends metrics to Weights & Biases, or keeps them in the run's folder (``mode: offline``, then ``wandb sync``)."""

    def __init__(
        self,
        project: str = "condensegrpo",
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        """Log to a project of an entity (user or team); without a mode as ``WANDB_MODE`` says."""
        self._project, self._entity, self._mode = project, entity, mode
        self._wandb: Any = None  # the library
        self._run: Any = None

    @staticmethod
    def check_options(**options: object) -> None:
        """Refuse to start without the package."""
        check_installed("wandb", extra="wandb", instead="take the tracker out of the configuration")

    def start(self, run: RunStart) -> StartedRun:
        """Open the run of an id that is kept in the run's folder, so that a resumed run continues it."""
        self._wandb = wandb = importlib.import_module("wandb")
        mode = self._mode or os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not wandb.login(prompt=False):  # a prompt would wait in the terminal of the training
            raise RuntimeError("no API key: run `wandb login`, set WANDB_API_KEY, or set the option mode to offline")
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            name=run.name,
            dir=str(run.folder),
            id=run.identity or secrets.token_hex(4),
            resume="allow",
            mode=mode,
            config=dict(run.config),
            settings=wandb.Settings(silent=True, console="off", disable_code=True),
        )
        self._run.define_metric("*", step_metric="step")  # own steps: those of a resumed run may be taken again
        return StartedRun(identity=self._run.id, location=str(self._run.dir if self._run.offline else self._run.url))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._run.log({"step": step, **metrics})

    def log_table(self, step: int, name: str, table: Table) -> None:
        """Record a table."""
        rows = [list(row) for row in table.rows]
        content = self._wandb.Table(columns=list(table.columns), data=rows, allow_mixed_types=True)
        self._run.log({"step": step, name: content})

    def close(self) -> None:
        """Send what is still waiting."""
        if self._run is not None:
            self._run.finish()
