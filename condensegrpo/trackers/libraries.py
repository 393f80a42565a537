"""Adapters to the libraries of experiment trackers, each imported when its run starts."""

import importlib
import io
import json
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal

from condensegrpo.core.credentials import has_credentials
from condensegrpo.core.packages import check_installed
from condensegrpo.core.protocols.tracker import RunStart, StartedRun, Table, Tracker, markdown

PARAMETERS = 100  # in one request
PARAMETER_CHARACTERS = 500  # of a value, the limit of servers before MLflow 2.10
DATABASES = ("sqlite:", "postgresql", "mysql", "mssql")  # stores that need the whole of MLflow


class MlflowTracker(Tracker):
    """Logs to MLflow: a server, or the local store that MLflow chooses (``MLFLOW_TRACKING_URI``)."""

    def __init__(self, experiment: str = "condensegrpo", tracking_uri: str | None = None) -> None:
        """Log to an experiment; without a tracking URI as MLflow's environment variables say."""
        self._experiment, self._uri = experiment, tracking_uri
        self._client: Any = None
        self._id = ""

    @staticmethod
    def check_options(**options: object) -> None:
        """Refuse a URI with a password, which ``config.yaml`` would hold, and to start without what the store needs."""
        if has_credentials(str(options.get("tracking_uri"))):
            raise ValueError(
                "tracking_uri names a user or password. Leave them out and set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD: config.yaml would hold them"
            )
        check_installed("mlflow", extra="mlflow", instead="take the tracker out of the configuration")
        uri = str(options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db")
        if uri.startswith(DATABASES) and not any(distributions(name="mlflow")):
            raise ValueError(
                f"of MLflow only mlflow-skinny is installed, which cannot write to the local store {uri}. Run pip "
                "install 'condensegrpo[mlflow]' (in a clone: pip install -e '.[mlflow]'), or name a server's URI"
            )

    def start(self, run: RunStart) -> StartedRun:
        """Open a run with the configuration as parameters and as ``config.json``, or continue one."""
        self._client = client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=self._uri)
        if run.identity is None:
            known = client.get_experiment_by_name(self._experiment)
            experiment = known.experiment_id if known else client.create_experiment(self._experiment)
            self._id = client.create_run(experiment, run_name=run.name).info.run_id
            parameter = importlib.import_module("mlflow.entities").Param
            parameters = [parameter(_name(key), value[:PARAMETER_CHARACTERS]) for key, value in _flat(run.config)]
            for first in range(0, len(parameters), PARAMETERS):
                client.log_batch(self._id, params=parameters[first : first + PARAMETERS])
        else:
            self._id = run.identity
            client.update_run(self._id, status="RUNNING")
        client.log_dict(self._id, dict(run.config), f"config-from-step-{run.step}.json")
        return StartedRun(identity=self._id, location=f"{client.tracking_uri}, run {self._id}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step; MLflow's names have no ``=``, and its stores take finite values only."""
        metric, now = importlib.import_module("mlflow.entities").Metric, int(time.time() * 1000)
        finite = ((name, value) for name, value in metrics.items() if math.isfinite(value))
        self._client.log_batch(self._id, metrics=[metric(_name(name), value, now, step) for name, value in finite])

    def log_table(self, step: int, name: str, table: Table) -> None:
        """Append to a table, which has the column ``step`` besides."""
        columns = zip(*table.rows, strict=True) if table.rows else ((),) * len(table.columns)
        content = {"step": [step] * len(table.rows), **dict(zip(table.columns, map(list, columns), strict=True))}
        self._client.log_table(self._id, content, f"{_name(name)}.json")

    def close(self) -> None:
        """Mark the run as finished."""
        if self._id:
            self._client.set_terminated(self._id)


def _flat(section: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values of nested sections by dotted names, in JSON."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _name(name: str) -> str:
    return re.sub(r"[^\w./ :-]", "_", name)


class TensorboardTracker(Tracker):
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
        self._writer = writer(str(folder), purge_step=run.recorded + 1 if run.identity else None)
        rows = tuple((key, str(value)) for key, value in run.config.items())
        self._writer.add_text("config", markdown(Table(columns=("key", "value"), rows=rows)), run.step)
        return StartedRun(identity=folder.name, location=str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step; TensorBoard groups names by what is before the slash."""
        for name, value in metrics.items():
            self._writer.add_scalar(name if name.startswith("eval/") else f"train/{name}", value, step)
        self._writer.flush()

    def log_table(self, step: int, name: str, table: Table) -> None:
        """Record a table as a text."""
        self._writer.add_text(name, markdown(table), step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class TrackioTracker(Tracker):
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


class WandbTracker(Tracker):
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
