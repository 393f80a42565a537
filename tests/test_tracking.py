import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from builders import add_trajectory, ledger_episode, scored

from condensegrpo.config.load import find_config, load_config
from condensegrpo.config.options import build_plugin
from condensegrpo.config.use import TrackerUse
from condensegrpo.core.credentials import has_credentials, redacted, without_credentials
from condensegrpo.core.errors import ConfigError, DataError
from condensegrpo.core.evaluation import Evaluation
from condensegrpo.core.observer import Observer
from condensegrpo.core.packages import check_installed
from condensegrpo.core.protocols.tracker import RunStart, StartedRun, Table, Tracker
from condensegrpo.storage.run_folder import JsonlTracker, RunFolder, read_metrics
from condensegrpo.storage.trajectories import start_file
from condensegrpo.trackers.background import BackgroundTracker
from condensegrpo.trackers.libraries import MlflowTracker, TensorboardTracker
from condensegrpo.training.tracking import RunTracking


def test_every_call_is_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"loss": 0.5})
    assert json.loads(path.read_text()) == {"step": 1, "loss": 0.5}
    tracker.log(1, {"eval/success": 0.25})
    assert read_metrics(path) == ({"step": 1, "loss": 0.5}, {"step": 1, "eval/success": 0.25})


def test_the_tracker_is_found_by_its_name(tmp_path: Path) -> None:
    tracker: Tracker = build_plugin("trackers", "jsonl", {"path": str(tmp_path / "more.jsonl")})
    tracker.log(3, {"loss": 1.0})
    assert (tmp_path / "more.jsonl").read_text() == '{"step":3,"loss":1.0}\n'


def test_tensorboard_shows_every_step_once_also_of_a_run_that_was_killed_before_its_first_checkpoint(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    starts: list[tuple[str | None, int, dict[int, float]]] = [  # identity, recorded steps, losses
        (None, -1, {0: 0.75, 1: 0.5}),
        ("as before", -1, {0: 1.0, 1: 0.5, 2: 0.25}),
        ("as before", 1, {2: 0.125}),
    ]
    for identity, recorded, losses in starts:
        tracker = TensorboardTracker()
        tracker.start(
            RunStart(name="r", folder=tmp_path, config={"seed": 3}, step=1, recorded=recorded, identity=identity)
        )
        for step, loss in losses.items():
            tracker.log(step, {"loss": loss, "weight/correct": 0.5, "eval/success": 0.5})
        tracker.log_table(step, "evaluation", Table(columns=("metric", "low"), rows=(("a|b", None),)))
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [(0, 1.0), (1, 0.5), (2, 0.125)]
    assert events.Tags()["scalars"] == ["train/loss", "train/weight/correct", "eval/success"]
    (text,) = events.Tensors("evaluation/text_summary")[-1].tensor_proto.string_val
    assert text.decode() == "| metric | low |\n| --- | --- |\n| a\\|b |  |\n"


def kept_by(library: str, folder: Path) -> Any:
    """What a library kept of a run of two steps that was resumed after the first."""
    pytest.importorskip(library)
    program = [sys.executable, str(Path(__file__).with_name("tracked_run.py")), library, str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_weights_and_biases_keeps_an_offline_run_and_goes_on_with_it(tmp_path: Path) -> None:
    kept = kept_by("wandb", tmp_path)
    assert kept["runs"] == [kept["identity"]] * 2
    assert kept["losses"] == [[1, 0.5], [2, 0.25], [2, 0.125]]
    assert kept["config"]["condenser"] == {"name": "last_k", "options": {"keep_last": 1}}
    assert kept["tables"] == 3
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert [file for file in files if b"not-to-be-written-anywhere" in file.read_bytes()] == []


def test_mlflow_keeps_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    kept = kept_by("mlflow", tmp_path)
    assert kept["runs"] == [kept["identity"], "ours", "FINISHED"]
    assert kept["losses"] == [[1, 0.5], [2, 0.25], [2, 0.125]]
    assert kept["other"] == 0.75
    last_k = {"condenser.name": "last_k", "condenser.options.keep_last": "1"}
    assert kept["config"] == {"seed": "3", **last_k, "evaluate.variants.K_20": "[]"}
    rows = [[step, *row] for step in (1, 2, 2) for row in (["2+2?", 1.0], ["3+3?", None])]
    assert kept["table"] == {"columns": ["step", "question", "success"], "data": rows}
    assert kept["artifacts"] == ["config-from-step-0.json", "config-from-step-1.json", "trajectories"]


def test_the_local_store_of_mlflow_needs_more_than_its_small_package(monkeypatch: pytest.MonkeyPatch) -> None:
    if any(distributions(name="mlflow")):
        pytest.skip("the whole of MLflow is installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ValueError, match=r"only mlflow-skinny is installed, .* pip install 'condensegrpo\[mlflow\]'"):
        MlflowTracker.check_options()
    MlflowTracker.check_options(tracking_uri="https://mlflow.example.com")


def test_trackio_keeps_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    kept = kept_by("trackio", tmp_path)
    assert kept["runs"] == [kept["identity"]]
    assert kept["losses"] == [[1, 0.5], [2, 0.25], [2, 0.125]]
    assert kept["config"]["condenser"] == {"name": "last_k", "options": {"keep_last": 1}}
    assert kept["tables"] == 3


@pytest.mark.parametrize("library", ["mlflow", "tensorboard", "trackio", "wandb"])
def test_a_name_alone_is_a_tracker_and_imports_no_library(library: str) -> None:
    tracker = build_plugin("trackers", library, {})
    assert isinstance(tracker, Tracker)


def test_a_tracker_whose_package_is_missing_says_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"pip install 'condensegrpo\[no_such_package\]'"):
        check_installed("no_such_package", extra="no_such_package", instead="take it out")


class Recorder:
    """A tracker that keeps what it is given, and waits or fails where a test asks for it."""

    def __init__(self, *, fails_at: Sequence[int] = (), waits_for: threading.Event | None = None) -> None:
        self.fails_at, self.waits_for = fails_at, waits_for
        self.steps: list[int] = []
        self.starts: list[RunStart] = []
        self.tables: dict[str, Table] = {}

    def start(self, run: RunStart) -> StartedRun:
        self.starts.append(run)
        return StartedRun(identity="x7", location="http://ana:secret@host/x7")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.waits_for is not None:
            self.waits_for.wait()
        if step in self.fails_at:
            raise ConnectionError(f"no route to host, key {os.environ['OUR_API_KEY']}")
        self.steps.append(step)

    def log_table(self, step: int, name: str, table: Table) -> None:
        self.tables[name] = table

    def close(self) -> None:
        self.steps.append(-1)


def test_of_two_credentials_that_begin_alike_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "secret-prefix")
    monkeypatch.setenv("B_TOKEN", "secret-prefix-and-tail")
    assert redacted("refused secret-prefix-and-tail, not secret-prefix") == "refused ***, not ***"


def test_numbers_and_mappings_under_names_of_credentials_are_removed_and_queries_of_addresses_stay() -> None:
    tree = {"api_key": 123456, "token": {"value": "abc"}, "max_tokens": 8, "url": "http://a.org?mail=a@b.c"}
    hidden = {"api_key": "***", "token": {"value": "***"}, "max_tokens": 8, "url": "http://a.org?mail=a@b.c"}
    assert without_credentials(tree) == hidden
    assert not has_credentials(str(tree["url"]))


def test_failures_are_counted_and_said_once_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_API_KEY", "0123456789")
    recorder = Recorder(fails_at=(2, 3))
    tracker = BackgroundTracker("mine", recorder)
    for step in (1, 2, 3, 4):
        tracker.log(step, {})
    tracker.end()
    assert tracker.wait(60) == "tracker mine lost 2 of 4 records"
    assert recorder.steps == [1, 4, -1]
    (message,) = tracker.messages()
    assert message.startswith("tracker mine: ConnectionError: no route to host, key ***")
    assert "0123456789" not in message


def test_a_tracker_that_changes_what_it_is_given_changes_no_metrics_and_one_that_only_logs_ends() -> None:
    class Clearing:
        def log(self, step: int, metrics: dict[str, float]) -> None:
            metrics.clear()

    tracker, metrics = BackgroundTracker("mine", Clearing()), {"success": 1.0}  # type: ignore[arg-type]  # wrong on purpose
    tracker.log(1, metrics)
    tracker.end()
    assert tracker.wait(60) == ""
    assert metrics == {"success": 1.0}
    assert tracker.messages() == []


@pytest.mark.parametrize(
    ("methods", "wanted"),
    [
        ("def close(self): pass", r"Mine has no log \(.*own.py:1\)"),
    ],
)
def test_a_tracker_without_the_methods_of_one_is_refused_before_a_run(
    tmp_path: Path, methods: str, wanted: str
) -> None:
    (tmp_path / "own.py").write_text(f"class Mine:\n    {methods}\n")
    with pytest.raises(ConfigError, match=wanted):
        TrackerUse(name=f"{tmp_path / 'own.py'}:Mine").check()


def test_a_tracker_that_hangs_costs_records_and_no_time() -> None:
    hang = threading.Event()
    tracker = BackgroundTracker("mine", Recorder(waits_for=hang))
    began = time.monotonic()
    for step in range(100):
        tracker.log(step, {})
    tracker.end()
    loss = tracker.wait(0.05)
    assert time.monotonic() - began < 30
    assert loss.endswith("of 100 records and did not end in time")
    hang.set()


def test_a_run_gives_its_trackers_everything_and_keeps_their_identity(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "mine")
    source = tmp_path / "own.py"
    source.write_text(
        "from test_tracking import Recorder\n\nshared = Recorder()\nclass Mine:\n"
        "    def __new__(cls):\n        return shared\n"
    )
    config = load_config(find_config("quickstart"), [f"trackers=['{source}:Mine']", "sampler.options={api_key: abc}"])
    recorder = build_plugin("trackers", f"{source}:Mine", {})
    start_file(folder.evaluation(2, "held-out"))
    add_trajectory(
        folder.evaluation(2, "held-out"),
        scored(ledger_episode(["keep 1", "report 2"], ["+1"], keep_last=0), 1.0, correct=1.0),
    )
    said: list[str] = []
    observer = Observer()
    observer.notice = said.append  # type: ignore[method-assign]  # it records what is said
    tracking = RunTracking(config, folder, observer)
    tracking.start(0)
    result = Evaluation(
        name="held-out",
        problems=1,
        samples=1,
        seed=0,
        success=0.5,
        success_low=0.25,
        success_high=0.75,
        pass_at={},
        metrics={},
        information=(),
        seconds=1.0,
    )
    tracking.evaluated(2, [result])
    tracking.close()
    assert said == [f"tracker {source}:Mine: http://***@host/x7"]
    assert read_metrics(folder.metrics)[0]["eval/success"] == 0.5
    assert recorder.starts[0].config["sampler"]["options"] == {"api_key": "***"}
    table = recorder.tables["trajectories/held-out"]
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["answer"], row["correct"], row["turns"]) == ("7", 1.0, 2)
    assert "turn 1 (" in row["contexts"]
    assert row["condensed spans"] == "turn 1, last_k: 16 → 9 tokens; turns 0–0 dropped (7 tokens)"
    resumed = RunTracking(config, folder, Observer())
    resumed.start(2)
    resumed.close()
    assert [(start.step, start.identity) for start in recorder.starts] == [(0, None), (2, "x7")]
    for content in ('{"a": ', "[]", '{"a": 1}'):
        folder.trackers.write_text(content)
        with pytest.raises(DataError, match=r"trackers\.json: it is damaged .*Remove it: the next start writes it"):
            RunTracking(config, folder, Observer()).start(2)
