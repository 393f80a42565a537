"""A resumed run with a real tracker, offline: `python tests/tracked_run.py wandb FOLDER` prints what is kept.

A process of its own: the libraries start services, and read their environment when they are imported.
"""

import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from condensegrpo.config.options import build_plugin
from condensegrpo.core.protocols.tracker import RunStart, Table

CONFIG = {
    "seed": 3,
    "condenser": {"name": "last_k", "options": {"keep_last": 1}},
    "evaluate": {"variants": {"K=20": []}},
}
TABLE = Table(columns=("question", "success"), rows=(("2+2?", 1.0), ("3+3?", None)))


def play(name: str, options: dict[str, object], folder: Path) -> str:
    """Log two steps, resume after the first and log the second again; returns the identity of the tracker's run."""
    identity: str | None = None
    for step, losses in ((0, (0.5, 0.25)), (1, (0.125,))):
        time.sleep(1.1 * step if name == "wandb" else 0)  # it names a folder by id and second
        tracker = build_plugin("trackers", name, options)
        start = RunStart(name="ours", folder=folder, config=CONFIG, step=step, recorded=step, identity=identity)
        identity = tracker.start(start).identity
        for number, loss in enumerate(losses, step + 1):
            tracker.log(number, {"loss": loss, "eval/k=20/success": 0.75})
            tracker.log_table(number, "trajectories/held-out", TABLE)
        tracker.close()
    assert identity is not None
    return identity


def records(log: bytes) -> Iterator[bytes]:
    """The records of a log file of W&B, which is one of LevelDB: blocks of parts with 7 bytes of header each."""
    record, place = b"", 7
    while place + 7 <= len(log):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", log, place + 4)
        record += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb(folder: Path) -> dict[str, object]:
    os.environ.update(WANDB_MODE="offline", WANDB_API_KEY="not-to-be-written-anywhere", HOME=str(folder))
    identity = play("wandb", {"project": "p"}, folder)
    from wandb import teardown
    from wandb.proto.wandb_internal_pb2 import Record

    teardown()  # its service writes the last records of a run after the run is finished
    kept: dict[str, object] = {
        "identity": identity,
        "runs": [],
        "losses": [],
        "tables": 0,
        "config": {},
    }
    for file in sorted(folder.rglob("run-*.wandb")):
        for record in map(Record.FromString, records(file.read_bytes())):
            if record.HasField("run"):
                kept["runs"].append(record.run.run_id)
                kept["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            values = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "loss" in values:
                kept["losses"].append([json.loads(values["step"]), json.loads(values["loss"])])
            kept["tables"] += any("table-file" in value for value in values.values())
    return kept


def mlflow(folder: Path) -> dict[str, object]:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # its other local store needs the whole of MLflow
    uri = (folder / "mlruns").as_uri()
    identity = play("mlflow", {"experiment": "e", "tracking_uri": uri}, folder)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    table = next(folder.rglob("trajectories/held-out.json"))
    return {
        "identity": identity,
        "runs": [run.info.run_id, run.info.run_name, run.info.status],
        "losses": [[each.step, each.value] for each in client.get_metric_history(identity, "loss")],
        "other": run.data.metrics["eval/k_20/success"],
        "table": json.loads(table.read_text()),
        "artifacts": sorted(item.path for item in client.list_artifacts(identity)),
        "config": run.data.params,
    }


def trackio(folder: Path) -> dict[str, object]:
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    identity = play("trackio", {"project": "p"}, folder)
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("p", identity)
    return {
        "identity": identity,
        "runs": SQLiteStorage.get_runs("p"),
        "losses": [[line["step"], line["loss"]] for line in logs if "loss" in line],
        "tables": sum("trajectories/held-out" in line for line in logs),
        "config": SQLiteStorage.get_run_config("p", identity),
    }


if __name__ == "__main__":
    print(json.dumps({"wandb": wandb, "mlflow": mlflow, "trackio": trackio}[sys.argv[1]](Path(sys.argv[2]))))
