"""The tracker ``mlflow``: metrics and tables to an MLflow server, or into a local store."""

import importlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from typing import Any

from condensegrpo.core.credentials import has_credentials
from condensegrpo.core.packages import check_installed
from condensegrpo.core.protocols.tracker import RunStart, StartedRun
from condensegrpo.core.table import Table

PARAMETERS = 100  # in one request
PARAMETER_CHARACTERS = 500  # of a value, the limit of servers before MLflow 2.10
DATABASES = ("sqlite:", "postgresql", "mysql", "mssql")  # stores that need the whole of MLflow


class MlflowTracker:
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
