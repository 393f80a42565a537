import json
from pathlib import Path

import pytest

from condensegrpo.errors import RunError
from condensegrpo.plugins import build
from condensegrpo.protocols import Tracker
from condensegrpo.storage import read_metrics
from condensegrpo.tracking import JsonlTracker


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
