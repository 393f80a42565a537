import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from condensegrpo.assembly.plugins import build
from condensegrpo.core.errors import ConfigError, RunError
from condensegrpo.core.protocols import Tracker
from condensegrpo.storage import trackers as tracking
from condensegrpo.storage.trackers import JsonlTracker, read_metrics


def test_every_call_is_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"loss": 0.5})
    assert json.loads(path.read_text()) == {"step": 1, "loss": 0.5}
    tracker.log(1, {"eval/success": 0.25})
    assert read_metrics(path) == ({"step": 1, "loss": 0.5}, {"step": 1, "eval/success": 0.25})


def test_closing_twice_does_no_harm(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.close()
    tracker.close()


def test_the_tracker_is_found_by_its_name(tmp_path: Path) -> None:
    tracker: Tracker = build("trackers", "jsonl", {"path": str(tmp_path / "more.jsonl")})
    tracker.log(3, {"loss": 1.0})
    assert (tmp_path / "more.jsonl").read_text() == '{"step":3,"loss":1.0}\n'


def test_a_full_disk_is_a_run_error() -> None:
    with pytest.raises(RunError, match="No space left"):
        JsonlTracker("/dev/full").log(1, {"loss": 1.0})


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    tracker: Tracker = build("trackers", "tensorboard", {"folder": str(tmp_path)})
    tracker.log(3, {"eval/success": 0.25})
    tracker.log(4, {"eval/success": 0.75})
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/success")] == [(3, 0.25), (4, 0.75)]


def test_weights_and_biases_keeps_an_offline_run(tmp_path: Path) -> None:
    """A process of its own: the library starts a service and leaves handlers behind."""
    code = (
        "from condensegrpo.assembly.plugins import build\n"
        f"tracker = build('trackers', 'wandb', {{'project': 'p', 'name': 'n', 'folder': {str(tmp_path)!r}}})\n"
        "tracker.log(1, {'success': 0.5})\n"
        "tracker.close()\n"
    )
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path, timeout=120)
    (file,) = tmp_path.rglob("run-*.wandb")
    assert b"success" in file.read_bytes()


def test_a_tracker_whose_package_is_missing_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[no_such_package\]'"):
        tracking._package("no_such_package")
